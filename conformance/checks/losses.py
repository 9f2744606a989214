"""The rows of the losses other than LK that an adapter declares, like those of stages.py."""

import numpy as np

from draftconf.reference.divergences import divergence, hybrid
from draftconf.reference.graph import Node
from draftconf.reference.loss import target_op

from ..protocol.losses import LOSSES, Declared, declared
from .stages import Stage, at, lk_arrays


def loss_stages(said) -> list[Stage]:
    """A row for each loss that was declared, in the order of the table."""
    offered = declared(said)
    return [loss_row(name, said) for name in LOSSES if name in offered]


def loss_row(name: str, said) -> Stage:
    """The row of a loss as it was declared."""
    op = loss_op(name, Declared.of(name, said[name]))
    nodes = [
        Node(at("target_log_probs"), target_op("restricted"), ("target_logits", "draft_to_target")),
        Node(at("slot_loss"), op, ("draft_logits", at("target_log_probs"), "mask")),
    ]
    return Stage(
        name, *LOSSES[name], lambda config, choices: nodes,
        {"draft_logits": "draft_logits", "target_logits": "target_logits"}, {"loss": at("slot_loss")}, arrays,
    )  # fmt: skip


def arrays(case, choices, rng) -> dict:
    """Those of ``lk_loss``, with every third slot outside the mask. Over the draft's vocabulary, if that is smaller."""
    logits = lk_arrays(case, choices, rng)
    logits["target_logits"] = logits["target_logits"][..., : logits["draft_logits"].shape[-1]]
    return logits | {"mask": np.arange(len(logits["draft_logits"])) % 3 != 1}


def loss_op(name: str, declared: Declared):
    if name == "hybrid_loss":
        return hybrid(declared.first, declared.decay, declared.reduction, declared.first_reduction)
    return divergence(name.removesuffix("_loss"), declared.reduction)
