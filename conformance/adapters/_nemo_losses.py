"""NeMo AutoModel's losses of one step: LK, the hybrid of it, and the soft cross-entropy."""

from types import SimpleNamespace

import torch
from nemo_automodel.components.loss.soft_ce import masked_soft_cross_entropy

from ..torch_helper import stage
from ._nemo_parts import Parts, core, refuse
from ._nemo_recorder import Recorder


class Losses(Parts):
    """The losses of its EAGLE-3 trainer; the two that it has beside LK are means over the supervised slots."""

    losses = {
        "soft_ce_loss": {"reduction": "supervised"},
        "hybrid_loss": {"reduction": "supervised", "first": "soft_ce", "decay": 3.0},
    }

    @stage
    def lk_loss(self, t, forced):
        refuse(forced)
        recorder = Recorder()
        with recorder.listening():
            lk_step_loss("alpha", t)
        (log_acceptance,), _ = recorder.kept["1/lk_loss"]
        return {"loss": -log_acceptance}, {"below": recorder.below["1/below"]}

    @stage
    def soft_ce_loss(self, t, forced):
        return {"loss": masked_soft_cross_entropy(t["draft_logits"], *target_distribution(t))}

    @stage
    def hybrid_loss(self, t, forced):
        return {"loss": lk_step_loss("lambda", t)}


def target_distribution(t) -> tuple:
    """Probabilities, and which slots count."""
    vocabulary = torch.arange(t["draft_logits"].shape[-1])
    mask = t.get("mask", torch.ones(t["target_logits"].shape[:-1], dtype=torch.bool))
    return core._compute_target_distribution(t["target_logits"], vocabulary, vocabulary >= 0, mask)


def lk_step_loss(kind: str, t):
    trainer = SimpleNamespace(lk_loss_type=kind, cp_group=None, lk_kl_scale=1.0, lk_kl_decay=3.0)
    return core.Eagle3TrainerModule._lk_step_loss(trainer, t["draft_logits"], *target_distribution(t))
