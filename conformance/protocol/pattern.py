"""What an adapter declares about its own EAGLE-3 step, for the method ``pattern``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from .losses import slot_losses

#: Losses of one slot by name, of draft logits and target logits [..., V] -> [...].
LOSSES = {name: slot_losses(name) for name in ("lk", "soft_ce", "kl", "tv")}
#: What a step's sum of slot losses is divided by: slots that are supervised, or all B T slots.
DENOMINATORS = ("supervised", "all_slots")


@dataclass(frozen=True)
class Pattern:
    """``describe()["pattern"]``, checked. Raises ValueError with a sentence.

    ``step_weights``: K numbers. ``epsilon`` is added to the denominator. ``batch``: rows that it takes. ``documents``:
    whether it takes packed ones. ``padding``: whether it is to be judged on a row that begins with padding, whose
    slots have document -1.
    """

    loss: str = "lk"
    step_weights: tuple = (1 / 7,) * 7
    denominator: str = "supervised"
    epsilon: float = 0.0
    batch: int = 2
    documents: bool = False
    padding: bool = False

    @classmethod
    def of(cls, said) -> "Pattern":
        where = "describe()['pattern']"
        if not isinstance(said, Mapping):
            raise ValueError(f"{where} is {said!r}; wanted a mapping")
        unknown = sorted(set(said) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"{where} has {unknown[0]!r}; wanted some of {', '.join(f.name for f in fields(cls))}")
        found = cls(**{**said, "step_weights": _weights(said.get("step_weights"), f"{where}['step_weights']")})
        for name, known in (("loss", tuple(LOSSES)), ("denominator", DENOMINATORS)):
            if getattr(found, name) not in known:
                raise ValueError(f"{where}[{name!r}] is {getattr(found, name)!r}; wanted one of {', '.join(known)}")
        if isinstance(found.batch, bool) or not isinstance(found.batch, int) or not 1 <= found.batch <= 4:
            raise ValueError(f"{where}['batch'] is {found.batch!r}; wanted a number of rows from 1 to 4")
        if isinstance(found.epsilon, bool) or not isinstance(found.epsilon, int | float) or not 0 <= found.epsilon < 1:
            raise ValueError(f"{where}['epsilon'] is {found.epsilon!r}; wanted a number from 0 to below 1")
        for name in ("documents", "padding"):
            if not isinstance(getattr(found, name), bool):
                raise ValueError(f"{where}[{name!r}] is {getattr(found, name)!r}; wanted True or False")
        return found

    def slot_losses(self, draft, target):
        """[..., V] twice -> [...]."""
        return LOSSES[self.loss](draft, target)

    def step_loss(self, losses, supervised: np.ndarray):
        """The loss of one step from those of its slots [B, T]."""
        count = supervised.size if self.denominator == "all_slots" else max(int(supervised.sum()), 1)
        return np.sum(np.where(supervised, losses, 0.0)) * (1 / (count + self.epsilon))


def _weights(value, where: str) -> tuple:
    try:
        weights = tuple(float(w) for w in value)
    except (TypeError, ValueError):
        weights = ()
    if not weights or not all(0 <= w < float("inf") for w in weights):
        raise ValueError(f"{where} is {value!r}; wanted a list of one number >= 0 for each step")
    return weights
