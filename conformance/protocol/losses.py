"""Losses that other trainers of draft models use, as adapters declare them in ``describe()["losses"]``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from draftconf.reference import loss
from draftconf.reference.divergences import DIVERGENCES, REDUCTIONS

ARXIV = "arXiv:2602.23881"
#: Method: equation and source.
LOSSES = {
    "soft_ce_loss": ("-sum p log q", "arXiv:2503.01840"),
    "kl_loss": ("sum p (log p - log q)", ARXIV),
    "reverse_kl_loss": ("sum q (log q - log p)", "arXiv:2306.08543"),
    "js_loss": ("(KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2", "doi:10.1109/18.61115"),
    "tv_loss": ("1 - sum min(p, q)", ARXIV),
    "hybrid_loss": ("w first + (1 - w) (1 - alpha) with w = exp(-decay alpha) detached, alpha = sum min(p, q)", ARXIV),
}
FIRST_TERMS = ("kl", "soft_ce")


@dataclass(frozen=True)
class Declared:
    """What an adapter says of one loss, checked. Raises ValueError with a sentence.

    ``reduction``: one loss for each slot, or their mean over the slots of ``mask``, or over all slots with those
    outside it counted as 0. The other three are of ``hybrid_loss``; ``first_reduction`` is ``reduction`` if left out.
    """

    reduction: str = "none"
    first: str = "kl"
    decay: float = 3.0
    first_reduction: str = ""

    @classmethod
    def of(cls, name: str, said) -> "Declared":
        where = f"describe()['losses'][{name!r}]"
        if name not in LOSSES:
            raise ValueError(f"describe()['losses'] has {name!r}; wanted some of {', '.join(LOSSES)}")
        if not isinstance(said, Mapping):
            raise ValueError(f"{where} is {said!r}; wanted a mapping")
        known = [field.name for field in fields(cls)][: None if name == "hybrid_loss" else 1]
        unknown = [key for key in said if key not in known]
        if unknown:
            raise ValueError(f"{where} has {unknown[0]!r}; wanted some of {', '.join(known)}")
        found = cls(**{"first_reduction": said.get("reduction", "none"), **said})
        for key, allowed in (("reduction", REDUCTIONS), ("first_reduction", REDUCTIONS), ("first", FIRST_TERMS)):
            if getattr(found, key) not in allowed:
                raise ValueError(f"{where}[{key!r}] is {getattr(found, key)!r}; wanted one of {', '.join(allowed)}")
        if (found.reduction == "none") != (found.first_reduction == "none"):
            raise ValueError(f"{where} reduces one of its two terms; wanted both or neither")
        number = isinstance(found.decay, int | float) and not isinstance(found.decay, bool)
        if not number or not 0 <= found.decay < float("inf"):
            raise ValueError(f"{where}['decay'] is {found.decay!r}; wanted a number >= 0")
        return found


def declared(said) -> dict[str, Declared]:
    """``describe()["losses"]``, checked. Raises ValueError with a sentence."""
    if not isinstance(said, Mapping):
        raise ValueError(f"describe()['losses'] is {said!r}; wanted a mapping from the names of losses")
    return {name: Declared.of(name, value) for name, value in said.items()}


def slot_losses(name: str):
    """The loss of every slot, of draft and target logits [..., V] -> [...]; ``lk`` included."""
    if name == "lk":
        return lambda draft, target: loss.lk_loss(draft, loss.target_log_probs(target))
    function, _ = DIVERGENCES[name]
    return lambda draft, target: function(loss.log_softmax(draft), loss.target_log_probs(target))
