"""Liger Kernel's divergences of draft and target, ``LigerFusedCETVDLoss`` and ``liger_jsd``, in Triton's interpreter.

It has no LK loss. ``tv_loss`` is the second of the two losses of each token that the former returns; the others are the
latter, a mean over the tokens with a label, at beta 0, 1 and 1/2: KL, reverse KL and Jensen-Shannon.

Install: ``make matrix``, or
``pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/liger-kernel.txt``.
"""

import os
from importlib.metadata import version

os.environ.setdefault("TRITON_INTERPRET", "1")
try:
    import torch
    from liger_kernel.transformers.functional import liger_jsd
    from liger_kernel.transformers.fused_ce_tvd import LigerFusedCETVDLoss
except ImportError as error:
    raise ImportError(
        f"The adapter liger_kernel needs the package liger-kernel ({error}). Install it with `make matrix`, or: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/liger-kernel.txt"
    ) from error

from ..torch_helper import TorchAdapter, stage

IGNORED = -100  # the label of a token that does not count


class LigerKernel(TorchAdapter):
    name = "liger-kernel"
    version = version("liger-kernel")
    url = "https://github.com/linkedin/Liger-Kernel"
    policies = {name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")}
    formats = policies["float32"]
    layouts = ["eagle3"]
    losses = {"tv_loss": {}} | {name: {"reduction": "supervised"} for name in ("kl_loss", "reverse_kl_loss", "js_loss")}

    @stage(frozen=("target_logits",))
    def tv_loss(self, t, forced):
        labels = torch.zeros(t["draft_logits"].shape[:-1], dtype=torch.long)
        return {"loss": LigerFusedCETVDLoss()(t["draft_logits"], t["target_logits"], labels)[1]}

    @stage(frozen=("target_logits",))
    def kl_loss(self, t, forced):
        return self._jsd(t, 0.0)

    @stage(frozen=("target_logits",))
    def reverse_kl_loss(self, t, forced):
        return self._jsd(t, 1.0)

    @stage(frozen=("target_logits",))
    def js_loss(self, t, forced):
        return self._jsd(t, 0.5)

    def _jsd(self, t, beta: float) -> dict:
        laws = (torch.log_softmax(t[name].float(), -1) for name in ("draft_logits", "target_logits"))
        labels = torch.where(t["mask"], 0, IGNORED)
        return {"loss": liger_jsd(*laws, shift_labels=labels, beta=beta, ignore_index=IGNORED)}


adapter = LigerKernel()
