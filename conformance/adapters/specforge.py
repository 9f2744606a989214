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

for name, value in {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)
try:
    import torch
    from specforge.algorithms.eagle3.model import _compute_loss_and_acceptance_rate, _compute_target_p
    from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss

    from ..torch_helper import TorchAdapter, stage
except ImportError as error:
    raise ImportError(
        f"The adapter specforge needs the package specforge ({error}). Install it with `make matrix`, or: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specforge.txt"
    ) from error


class SpecForge(TorchAdapter):
    name = "specforge"
    version = version("specforge")
    url = "https://github.com/sgl-project/SpecForge"
    policies = {name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")}
    formats = policies["float32"]
    layouts = ["eagle3"]
    losses = {
        "soft_ce_loss": {"reduction": "all_slots"},
        "hybrid_loss": {
            "reduction": "supervised", "first": "soft_ce", "decay": 1.0, "first_reduction": "all_slots",
        },
    }  # fmt: skip

    @stage(frozen=("target_logits",))
    def lk_loss(self, t, forced):
        draft, shape = t["draft_logits"], t["draft_logits"].shape
        target = t["target_logits"].reshape(1, -1, shape[-1])
        _, on_draft, *_ = target_law(target, torch.ones(target.shape[:2], dtype=torch.bool))
        slots = zip(draft.flatten(0, -2), on_draft[0], strict=True)
        with mock.patch.object(torch, "minimum", wraps=torch.minimum) as minimum:
            losses = [self._slot(d[None, None], p[None, None]) for d, p in slots]
        below = torch.stack([q < p for (p, q), _ in minimum.call_args_list]).reshape(shape)
        return {"loss": torch.stack(losses).reshape(shape[:-1])}, {"below": below}

    @stage(frozen=("target_logits",))
    def soft_ce_loss(self, t, forced):
        return self._step(None, t)

    @stage(frozen=("target_logits",))
    def hybrid_loss(self, t, forced):
        return self._step("lambda", t)

    def _step(self, kind, t) -> dict:
        renormalised, on_draft, _, mask = target_law(t["target_logits"][None], t["mask"][None])
        _, loss = _compute_loss_and_acceptance_rate(
            logits=t["draft_logits"][None] * 1,  # a copy: its backward pass writes into the logits
            target_p=renormalised, target_p_on_draft=on_draft, position_mask=mask,
            lk_loss_type=kind, kl_scale=1.0, kl_decay=1.0,
        )  # fmt: skip
        return {"loss": loss}

    def _slot(self, logits, target):
        mask = torch.ones(1, 1, 1, dtype=torch.bool)
        rate, log_rate = compute_acceptance_rate(logits=logits, target_probs=target, position_mask=mask)
        return compute_lk_loss(kl_loss=None, acceptance_rate=rate, log_acceptance_rate=log_rate, lk_loss_type="alpha",
                               kl_scale=1.0, kl_decay=1.0)  # fmt: skip


def target_law(logits, mask) -> tuple:
    """Renormalised and whole probabilities, the arg-max, and which slots count. logits [1, T, V], mask bool [1, T]."""
    return _compute_target_p(logits, torch.ones(logits.shape[-1], dtype=torch.bool), mask.long()[..., None])


adapter = SpecForge()
