"""Discrete choices: how many differ from the oracle's, which of them rounding allows, what an illegal one came from."""

from dataclasses import dataclass, field

import numpy as np

from draftconf.reference.bounds import Arithmetic
from draftconf.reference.running_error import Running, exact

from .compare import Comparison, Mismatch
from .operands import operand

LISTED = 16  # logits of an illegal token that are listed


@dataclass
class Decisions:
    """How many discrete outcomes differ from the oracle's, and how many of those the error margin allows."""

    total: int = 0
    flipped: int = 0
    legal: int = 0
    illegal: int = 0

    def add(self, flipped: np.ndarray, legal: np.ndarray) -> None:
        self.total += flipped.size
        self.flipped += int(flipped.sum())
        self.legal += int((flipped & legal).sum())
        self.illegal += int((flipped & ~legal).sum())

    def to_dict(self) -> dict:
        return {"total": self.total, "flipped": self.flipped, "legal": self.legal, "illegal": self.illegal}


def selection_scores(scores, bias: np.ndarray, formats: dict) -> tuple[np.ndarray, np.ndarray]:
    """What the router selects by, score + bias, and how far an honest one may be from it. Two [B, T, E]."""
    scores = exact(scores)
    key = scores.value + bias
    return key, scores.bound() + Arithmetic(formats)["router"].unit_roundoff * np.abs(key)  # one addition


def judge_experts(experts, scores, bias: np.ndarray, count: int, formats: dict) -> tuple[np.ndarray, np.ndarray]:
    """Chosen sets against score + bias. scores Running or array [B, T, E] -> flipped, legal bool [B, T].

    Legal: distinct valid ids, and no expert left out beats a chosen one by more than the two errors.
    """
    scores = exact(scores)
    ids = np.asarray(experts)
    shape = (*scores.shape[:-1], count)
    if ids.dtype.kind not in "iu" or ids.shape != shape:
        raise Mismatch(f"experts is {ids.dtype} of shape {ids.shape}; wanted integers of shape {shape}")
    key, error = selection_scores(scores, bias, formats)
    valid = (ids >= 0) & (ids < key.shape[-1])
    chosen = np.zeros(key.shape, bool)
    np.put_along_axis(chosen, np.clip(ids, 0, key.shape[-1] - 1), True, axis=-1)
    distinct = valid.all(-1) & (chosen.sum(-1) == count)
    lowest = np.where(chosen, key + error, np.inf).min(-1)
    highest = np.where(chosen, -np.inf, key - error).max(-1)
    best = np.argsort(-key, axis=-1, kind="stable")[..., :count]
    flipped = ~distinct | (np.sort(best, -1) != np.sort(ids, -1)).any(-1)
    return flipped, distinct & (lowest >= highest)


def near_best(logits: Running, tokens: np.ndarray, draft_to_target) -> np.ndarray:
    """Tokens whose logit is the largest to within the two errors. bool, as tokens."""
    ids = np.arange(logits.shape[-1]) if draft_to_target is None else draft_to_target
    index = np.argmax(tokens[..., None] == ids, axis=-1)[..., None]
    known = (tokens[..., None] == ids).any(-1)
    upper = np.take_along_axis(logits.value + logits.bound(), index, -1)[..., 0]
    return known & (upper >= (logits.value - logits.bound()).max(-1))


@dataclass
class Illegal:
    """The first choice that no rounding allows: the slot, a sentence, the two numbers, what they were taken from."""

    index: tuple
    message: str
    comparison: Comparison | None = None  # None where ids are out of range or repeat
    operands: list = field(default_factory=list)


def first_of(legal: np.ndarray) -> tuple:
    return tuple(map(int, np.argwhere(~legal)[0]))


def illegal_experts(experts, scores, bias: np.ndarray, legal: np.ndarray, formats: dict) -> Illegal:
    """Of the first illegal set: the worst expert that was chosen, and the best one that was left out."""
    at, key_error = first_of(legal), selection_scores(scores, bias, formats)
    (key, error), ids = (x[at] for x in key_error), np.asarray(experts)[at]
    taken_from = [operand("experts", experts, [(*at, i) for i in range(len(ids))])]
    taken_from += [operand("score + bias", key_error[0], [(*at, e) for e in range(len(key))])]
    if len(set(ids.tolist())) < len(ids) or ids.min() < 0 or ids.max() >= len(key):
        sentence = f"slot {list(at)} has the experts {ids.tolist()}; wanted {len(ids)} different ones of {len(key)}"
        return Illegal(at, sentence, None, taken_from)
    chosen = np.isin(np.arange(len(key)), ids)
    low, high = np.argmin(np.where(chosen, key + error, np.inf)), np.argmax(np.where(chosen, -np.inf, key - error))
    sentence = (
        f"slot {list(at)} has expert {low} with score + bias {key[low]:.9g} and not expert {high} with {key[high]:.9g}"
    )
    return Illegal(at, sentence, _apart(at, key[low], key[high], error[low] + error[high]), taken_from)


def illegal_token(logits: Running, tokens: np.ndarray, draft_to_target, legal: np.ndarray) -> Illegal:
    """Of the first illegal token: its logit, and the largest."""
    at = first_of(legal)
    row, error, token = logits.value[at], logits.bound()[at], int(tokens[at])
    ids = np.arange(len(row)) if draft_to_target is None else draft_to_target
    top = int(np.argmax(row))
    largest = np.argsort(-row, kind="stable")[:LISTED]
    taken_from = [operand("logits", logits.value, [(*at, i) for i in np.sort(largest)], len(row))]
    if token not in ids:
        return Illegal(at, f"slot {list(at)} has token {token}, which the draft cannot name", None, taken_from)
    mine = int(np.argmax(ids == token))
    sentence = f"slot {list(at)} has token {token} with logit {row[mine]:.9g}; {int(ids[top])} has {row[top]:.9g}"
    return Illegal(at, sentence, _apart(at, row[mine], row[top], error[mine] + error[top]), taken_from)


def _apart(at: tuple, lower: float, higher: float, bound: float) -> Comparison:
    ratio = (higher - lower) / bound if bound else float("inf")
    return Comparison(float(ratio), 1, at, float(lower), float(higher), float(bound))
