"""The losses of SpecForge: LK (``compute_acceptance_rate``, ``compute_lk_loss`` of type alpha), and the two beside it.

The package returns the mean over the slots of a batch, so for ``lk_loss`` every slot is handed over as a batch of its
own. Its cross-entropy averages over all slots, its acceptance over the supervised ones. The target's probabilities are
those that its training step makes.

Install: ``make matrix``, or
``pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specforge.txt``.
"""

import os
from importlib.metadata import version
from unittest import mock

import numpy as np

for name, value in {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)
try:
    import torch
    from specforge.algorithms.eagle3.model import _compute_loss_and_acceptance_rate, _compute_target_p
    from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss

    from conformance.torch_helper import DTYPES
except ImportError as error:
    raise ImportError(
        f"The adapter specforge needs the package specforge ({error}). Install it with `make matrix`, or: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specforge.txt"
    ) from error


class SpecForge:
    protocol = 1

    def describe(self) -> dict:
        policies = {
            name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")
        }
        return {
            "name": "specforge",
            "version": version("specforge"),
            "url": "https://github.com/sgl-project/SpecForge",
            "formats": policies["float32"],
            "policies": policies,
            "layouts": ["eagle3"],
            "losses": {
                "soft_ce_loss": {"reduction": "all_slots"},
                "hybrid_loss": {
                    "reduction": "supervised",
                    "first": "soft_ce",
                    "decay": 1.0,
                    "first_reduction": "all_slots",
                },
            },
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype = DTYPES[formats["storage"]]

    def lk_loss(self, inputs, *, cotangents=None, forced=None) -> tuple:
        shape = inputs["draft_logits"].shape
        draft = torch.tensor(inputs["draft_logits"], dtype=self.dtype, requires_grad=True)
        target = torch.tensor(inputs["target_logits"], dtype=self.dtype).reshape(1, -1, shape[-1])
        everything = torch.ones(shape[-1], dtype=torch.bool), torch.ones(*target.shape[:2], 1, dtype=torch.long)
        target = _compute_target_p(target, *everything)[1].reshape(shape)
        slots = [
            (d[None, None], p[None, None]) for d, p in zip(draft.flatten(0, -2), target.flatten(0, -2), strict=True)
        ]
        with mock.patch.object(torch, "minimum", wraps=torch.minimum) as minimum:
            losses = [self._slot(*slot) for slot in slots]
        below = np.stack([(q < p).numpy() for (p, q), _ in minimum.call_args_list]).reshape(shape)
        loss, grads = torch.stack(losses).reshape(shape[:-1]), {}
        if cotangents is not None:
            loss.backward(torch.tensor(np.asarray(cotangents["loss"]), dtype=loss.dtype))
            grads["draft_logits"] = draft.grad.float().numpy()
        return {"loss": loss.detach().numpy()}, grads, {"below": below}, {}

    def soft_ce_loss(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._step(None, inputs, cotangents)

    def hybrid_loss(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._step("lambda", inputs, cotangents)

    def _step(self, kind, inputs, cotangents) -> tuple:
        draft = torch.tensor(inputs["draft_logits"], dtype=self.dtype, requires_grad=True)
        target = torch.tensor(inputs["target_logits"], dtype=self.dtype)[None]
        everything = torch.ones(target.shape[-1], dtype=torch.bool)
        mask = torch.tensor(inputs["mask"]).long()[None, :, None]
        renormalised, on_draft, _, mask = _compute_target_p(target, everything, mask)
        _, loss = _compute_loss_and_acceptance_rate(
            logits=draft[None] * 1, target_p=renormalised, target_p_on_draft=on_draft, position_mask=mask,
            lk_loss_type=kind, kl_scale=1.0, kl_decay=1.0,
        )  # fmt: skip
        grads = {}
        if cotangents is not None:
            loss.backward(torch.tensor(np.asarray(cotangents["loss"]), dtype=loss.dtype))
            grads["draft_logits"] = draft.grad.float().numpy()
        return {"loss": loss.detach().float().numpy()}, grads

    def _slot(self, logits, target):
        mask = torch.ones(1, 1, 1, dtype=torch.bool)
        rate, log_rate = compute_acceptance_rate(logits=logits, target_probs=target, position_mask=mask)
        return compute_lk_loss(kl_loss=None, acceptance_rate=rate, log_acceptance_rate=log_rate, lk_loss_type="alpha",
                               kl_scale=1.0, kl_decay=1.0)  # fmt: skip


adapter = SpecForge()
