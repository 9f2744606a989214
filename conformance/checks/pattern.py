"""Checks of an EAGLE-3 step whose layer is not K3's: what its logits read, from outside.

The implementation runs its own layer with its own weights. What step k may read is found on the oracle's own unroll
(layout eagle3), by the same changes of the same inputs: one slot at a time, and which logits move.

A dependence says nothing of the way: what a step's key holds also travels in the recycled feature. ``cache`` tells them
apart. Make the features c times as large. The recycled feature is then c f + D_1 + ... + D_k, whose norm a token moves
by O(1/c), while the keys, made of normed values, keep their full size. So a token's effect on the logits of step k
less that on those of step k - 1, times c, goes to a number other than 0 where step k attends a key that holds the
token, and falls as 1/c where it does not.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from draftconf.reference.bounds import Arithmetic
from draftconf.reference.config import Choices
from draftconf.reference.formats import FORMATS, round_to
from draftconf.reference.unroll import FEATURES, outside_document

from ..adapters.reference import Reference
from ..judging import outcome as verdict
from ..protocol.pattern import Pattern
from ..protocol.result import AdapterError, NotOffered
from .cases import Case, generator, handed_over

SLOTS = 10
LARGE, LARGER = 256.0, 1024.0  # sizes of the features under which keys and recycled features part
REPEATS, QUIET = 6, 1e-4  # runs that show the noise, and the share of the logits below which it hides no dependence
NOISE = 8.0  # a response this many times the rounding noise is one
SAME = 2, 64  # roundings to the storage and the accumulation format within which two steps' logits are the same
APART = 8  # times that, from which on they are not
FADING = 0.5  # of the response at LARGE, what is left at LARGER: 1 of a key's, 1/4 of what passes a norm
ROUNDINGS = 4  # of the storage format that a response of the logits may be off by


@dataclass
class PatternRun:
    """One implementation's step on one set of inputs, and calls on changes of it."""

    subject: object
    case: Case
    choices: Choices
    policy: str
    seed: int

    @property
    def formats(self) -> dict:
        return self.subject.description.policies[self.policy]

    @property
    def storage(self) -> str:
        return self.formats["storage"]

    @property
    def unit(self) -> float:
        return FORMATS[self.storage].unit_roundoff

    @cached_property
    def declared(self) -> Pattern:
        return Pattern.of(self.subject.description.pattern)

    @property
    def steps(self) -> int:
        return self.case.config.num_steps

    @cached_property
    def inputs(self) -> dict:
        return pattern_inputs(self.case, self.storage, self.seed, self.declared)

    @cached_property
    def exists(self) -> np.ndarray:
        """Whether slot t of step k has a position. bool [K, B, T]."""
        documents, shape = self.inputs.get("documents"), self.inputs["tokens"].shape
        return np.stack([~outside_document(documents, k, shape) for k in range(1, self.steps + 1)])

    def call(self, inputs: dict, gradients: bool = False):
        """The adapter's answer to these inputs. Raises Wrong for outputs that cannot be read."""
        given = handed_over(inputs, self.storage)
        result = self.subject.call(
            "pattern", config=self.case.config, choices=self.choices, policy=self.policy, inputs=given,
            cotangents={"total_loss": np.ones((), given["high"].dtype)} if gradients else None,
        )  # fmt: skip
        shapes = {"logits": (*self.exists.shape, self.case.config.vocab_size), "step_losses": (self.steps,),
                  "total_loss": ()}  # fmt: skip
        for name, shape in shapes.items():
            if name not in result.outputs:
                raise Wrong(f"pattern returned no output {name!r}; wanted {', '.join(shapes)}")
            if np.shape(result.outputs[name]) != shape:
                raise Wrong(f"pattern: {name} has shape {np.shape(result.outputs[name])}; wanted {shape}")
        return result

    @cached_property
    def answer(self):
        try:
            return self.call(self.inputs, gradients=True)
        except (AdapterError, NotOffered, Wrong) as error:
            return error

    def base(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def logits(self, inputs: dict) -> np.ndarray:
        """[K, B, T, V] in float64; what has no position is 0."""
        return self.read(self.call(inputs))

    def read(self, result) -> np.ndarray:
        logits = np.asarray(result.outputs["logits"], float)
        missing = self.exists & ~np.isfinite(logits).all(-1)
        if missing.any():
            k, b, t = map(int, np.argwhere(missing)[0])
            raise Wrong(f"step {k + 1} has no finite logits at slot {t} of row {b}, whose position exists", k + 1)
        return np.where(self.exists[..., None], logits, 0.0)

    @cached_property
    def noise(self) -> np.ndarray:
        """How far the logits of a slot may move between runs on the same inputs, in the 2-norm: 0, if all are alike.

        By step, [K, 1, 1]: the largest move of any slot in some runs, and twice that, as another may move more.
        """
        base = self.read(self.base())
        moves = [np.linalg.norm(self.logits(self.inputs) - base, axis=-1)]
        if moves[0].any():  # stochastic rounding, sums in any order
            moves += [np.linalg.norm(self.logits(self.inputs) - base, axis=-1) for _ in range(REPEATS - 1)]
        return 2 * np.max(moves, axis=(0, 2, 3))[:, None, None]

    @cached_property
    def drowned(self) -> np.ndarray:
        """Steps whose noise may hide what they read. bool [K, 1, 1]."""
        size = np.linalg.norm(self.read(self.base()), axis=-1)
        return self.noise > QUIET * size.max(axis=(1, 2), keepdims=True)


class Wrong(Exception):
    """An answer that is a fault by itself; ``step`` is where, if it has a step."""

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


def judged(check):
    """A check whose Wrong is its failure."""

    def run(*arguments) -> dict:
        try:
            return check(*arguments)
        except Wrong as wrong:
            return verdict.failed(str(wrong), ratio=float("inf"), first_step=wrong.step)

    run.__doc__ = check.__doc__
    return run


def pattern_inputs(case: Case, storage: str, seed: int, declared: Pattern) -> dict:
    """Slot-aligned inputs as those of ``unroll``: ragged masks, of which no slot of the middle is always true."""
    rng, c, shape = generator(seed, "pattern", case.name), case.config, (declared.batch, SLOTS)
    inputs = {"tokens": rng.integers(1, c.vocab_size, shape).astype(np.int32)}
    inputs |= {name: round_to(rng.normal(size=(*shape, c.hidden_size)), storage) for name in FEATURES}
    inputs["target_logits"] = round_to(2 * rng.normal(size=(*shape, c.vocab_size)), storage)
    inputs["mask"] = np.tile(np.array([1, 0, 1, 1, 0, 1, 1, 1, 1, 0], bool), (declared.batch, 1))
    inputs["mask"][1:, [1, 2]] = True, False
    if declared.documents or declared.padding:
        inputs["documents"] = np.zeros(shape, np.int32)
    if declared.documents:
        first = 4 if declared.batch > 1 else 8  # one row of a single document, or one that is long enough for all steps
        inputs["documents"][-1, :first], inputs["documents"][-1, first:] = 5, 2
    if declared.padding:
        inputs["documents"][-1, :2] = -1
    return inputs


# -- what the logits read ----------------------------------------------------------------------------------------------


def changes(run: PatternRun) -> list[tuple[int, int]]:
    """Row and slot of every change: all slots of the last row, and one of the first for what leaks between rows."""
    batch, slots = run.inputs["tokens"].shape
    return [(batch - 1, j) for j in range(slots)] + ([(0, 2)] if batch > 1 else [])


def changed(inputs: dict, what: str, row: int, slot: int, size: int, storage: str, seed: int) -> dict:
    """The inputs with other features, or another token, at one slot; ``size`` makes another change of it."""
    rng, new = generator(seed, "change", what, str(row), str(slot), str(size)), dict(inputs)
    if what == "tokens":
        new["tokens"] = inputs["tokens"].copy()
        new["tokens"][row, slot] = (inputs["tokens"][row, slot] + 1 + 7 * size) % TOKENS + 1
        return new
    for name in FEATURES if what == "features" else (what,):
        new[name] = inputs[name].copy()
        new[name][row, slot] = round_to(4**size * rng.normal(size=inputs[name].shape[-1]), storage)
    return new


TOKENS = 90  # fewer than any case's vocabulary


def moved(logits: np.ndarray, base: np.ndarray, noise) -> np.ndarray:
    """Which slots' logits differ by more than the noise. bool [K, B, T]."""
    return np.linalg.norm(logits - base, axis=-1) > noise


def oracle_logits(run: PatternRun, inputs: dict) -> np.ndarray:
    """The oracle's own step on the same inputs, in its layout eagle3."""
    oracle = Reference()
    oracle.start(run.case.config.to_dict(), run.choices.to_dict())
    with np.errstate(all="ignore"):
        return np.where(run.exists[..., None], oracle.pattern(inputs)[0]["logits"], 0.0)


ORACLE: dict = {}  # what the oracle's own step reads, by the inputs and choices that it was asked on


def remembered(what: str, run: PatternRun, make):
    key = (what, run.storage, run.seed, run.declared, str(run.choices.to_dict()))
    if key not in ORACLE:
        ORACLE[key] = make()
    return ORACLE[key]


def read_by_oracle(run: PatternRun, what: str) -> list[tuple[int, int, np.ndarray]]:
    """(row, slot, bool [K, B, T]) of every change: the logits that the oracle's step moves by it."""

    def find() -> list:
        base = oracle_logits(run, run.inputs)
        alter = lambda row, j: changed(run.inputs, what, row, j, 0, run.storage, run.seed)  # noqa: E731
        return [(*at, moved(oracle_logits(run, alter(*at)), base, 0.0)) for at in changes(run)]

    return remembered(what, run, find)


@judged
def check_reads(run: PatternRun, what: str) -> dict:
    """``tokens`` or ``features``: the logits that a change at one slot moves are those that the oracle's step moves."""
    base, wrong = run.read(run.base()), []
    alter = lambda row, slot, size: changed(run.inputs, what, row, slot, size, run.storage, run.seed)  # noqa: E731
    asked, hidden = read_by_oracle(run, what), 0
    for row, slot, wanted in asked:
        seen = moved(run.logits(alter(row, slot, 0)), base, run.noise)
        if (wanted & ~seen & run.exists).any():  # another change, lest this one was lost in the rounding
            seen |= moved(run.logits(alter(row, slot, 1)), base, run.noise)
        unseen = wanted & ~seen & run.exists & run.drowned
        hidden += int(unseen.sum())
        differ = (seen != wanted) & run.exists & ~unseen
        wrong += [(*at, row, slot, bool(seen[*at])) for at in map(tuple, np.argwhere(differ))]
    compared = len(asked) * int(run.exists.sum()) - hidden
    if not wrong and hidden:
        message = f"{hidden} dependences are smaller than what runs on the same inputs differ by"
        return verdict.outcome("undecided", message=message, compared=compared)
    if not wrong:
        return verdict.outcome("pass", ratio=0.0, compared=compared)
    k, b, t = min(wrong, key=lambda at: (at[0], -at[1], *at[2:]))[:3]  # in the last row every slot was changed
    here = [(row, slot, seen) for *at, row, slot, seen in sorted(wrong) if tuple(at) == (k, b, t)]
    told = []
    for seen, sentence in (
        (True, "reads the {} of {}, which it must not"),
        (False, "does not read the {} of {}; it must"),
    ):
        slots = [f"slot {slot}" + ("" if row == b else f" of row {row}") for row, slot, so in here if so == seen]
        told += [sentence.format(what, ", ".join(slots))] * bool(slots)
    message = f"step {k + 1}, slot {t} of row {b} {', and '.join(told)}"
    return verdict.failed(message, ratio=float("inf"), first_step=int(k) + 1, compared=compared)


@judged
def check_fusion(run: PatternRun) -> dict:
    """Each of low, mid and high moves the logits of its slot at step 1."""
    base = run.read(run.base())
    for name in FEATURES:
        seen = moved(run.logits(changed(run.inputs, name, 0, 3, 0, run.storage, run.seed)), base, run.noise)
        if not seen[0, 0, 3] and run.drowned[0]:
            message = f"whether step 1 reads {name} is smaller than what runs on the same inputs differ by"
            return verdict.outcome("undecided", message=message)
        if not seen[0, 0, 3]:
            return verdict.failed(f"step 1, slot 3 does not read {name}; it must", ratio=float("inf"), first_step=1)
    return verdict.outcome("pass", ratio=0.0, compared=3)


# -- what it reads it from ---------------------------------------------------------------------------------------------


def constant_logits(run: PatternRun) -> tuple[np.ndarray, float]:
    """The logits less their mean where every slot holds one token and one feature, and how near two are the same."""
    constant = dict(run.inputs)
    for name in ("tokens", *FEATURES):
        constant[name] = np.ascontiguousarray(np.broadcast_to(run.inputs[name][:1, :1], run.inputs[name].shape))
    logits = run.logits(constant)
    return logits - logits.mean(-1, keepdims=True), SAME[0] * run.unit + SAME[1] * Arithmetic(run.formats).unit


@judged
def check_recycle(run: PatternRun) -> dict:
    """A step goes on from the output of the step before.

    One token and one feature in every slot: then all values that step 1 attends are equal, and a step that reads what
    an earlier one read returns what that one returned.
    """
    centred, near, unclear = *constant_logits(run), ""
    for k in range(1, run.steps):
        for earlier in range(k):
            slots = run.exists[k]
            apart, size = (
                np.linalg.norm((centred[k] - centred[earlier])[slots]),
                np.linalg.norm(centred[earlier][slots]),
            )
            message = f"step {k + 1} returns what step {earlier + 1} did where all slots hold one token and one feature"
            if apart <= near * size:
                message += f": it reads what step {earlier + 1} read, not the output of step {k}"
                return verdict.failed(message, ratio=float("inf"), first_step=k + 1)
            if apart <= APART * near * size:
                unclear = f"{message}, to within {apart / size:.2g}; {run.storage} does not tell them apart"
    if unclear:
        return verdict.outcome("undecided", message=unclear)
    return verdict.outcome("pass", ratio=0.0, compared=int(run.exists[1:].sum()))


def responses(run: PatternRun, logits) -> tuple[dict, np.ndarray]:
    """By slot whose token is changed: c (R_k - R_(k-1)) at both sizes c, [2, K, T, V], R the move of the logits of the
    first row; R_0 = 0. And c R_k itself at the larger size. ``logits`` maps inputs to logits.
    """
    sized = [run.inputs | {name: c * run.inputs[name] for name in FEATURES} for c in (LARGE, LARGER)]
    row, found = 0, {}
    base = [logits(inputs) for inputs in sized]
    for slot in range(run.inputs["tokens"].shape[1]):
        alter = lambda inputs: changed(inputs, "tokens", row, slot, 0, run.storage, run.seed)  # noqa: B023, E731
        moves = [(logits(alter(inputs)) - b)[:, row] for inputs, b in zip(sized, base, strict=True)]
        moves = np.stack([c * (m - m.mean(-1, keepdims=True)) for m, c in zip(moves, (LARGE, LARGER), strict=True)])
        found[slot] = np.concatenate([moves[:, :1], np.diff(moves, axis=1)], axis=1), moves[1]
    return found, base[1][:, row]


@np.errstate(divide="ignore", invalid="ignore")  # of logits that are all alike
def attended(run: PatternRun, logits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For step k, slot t and token slot j: whether a key that holds the token is attended, and whether that is
    decided. Two bool [K, T, T]; and whether the features stayed large up to step k, bool [K].
    """
    found, base = responses(run, logits)
    norm = lambda x: np.linalg.norm(x, axis=-1)  # noqa: E731
    centred, exists = base - base.mean(-1, keepdims=True), run.exists[:, 0]
    drift = [norm((centred[k] - centred[0])[exists[k]]).sum() / norm(centred[0][exists[k]]).sum()
             for k in range(run.steps)]  # fmt: skip
    large = np.array(drift) < LARGE / LARGER
    noise = NOISE * ROUNDINGS * run.unit * norm(centred[0]).max() * np.array([LARGE, LARGER])
    holds, sure = [], []
    for slot in range(run.inputs["tokens"].shape[1]):
        small, big = norm(found[slot][0])
        present = (big > noise[1]) & (big > FADING * small)
        effect = norm(np.maximum.accumulate(np.abs(found[slot][1]), axis=0))
        absent = (big <= FADING * np.maximum(small, noise[0])) | (big <= noise[1])
        holds.append(present)
        sure.append(present | (absent & (NOISE * noise[1] < effect)) | (effect == 0))
    return np.stack(holds, -1), np.stack(sure, -1), large


@np.errstate(divide="ignore", invalid="ignore")
def own_key_missing(run: PatternRun) -> bool:
    """Where all step-1 keys hold the same, step 1 returns the same at every slot; the own key of step 2 is the only one
    that differs, and what it weighs depends on how many others there are.
    """
    centred, near = constant_logits(run)
    spread = [np.linalg.norm((x - x[:1])[exists], axis=-1).max() / np.linalg.norm(x[0])
              for x, exists in zip(centred[:2, 0], run.exists[:2, 0], strict=True)]  # fmt: skip
    return bool(max(spread) <= near)


@judged
def check_cache(run: PatternRun) -> dict:
    """Every step attends the step-1 keys of its slot's past and the slot's own key of every later step."""
    run.read(run.base())
    wanted = remembered("cache", run, lambda: attended(run, lambda inputs: oracle_logits(run, inputs))[0])
    if own_key_missing(run):
        raise Wrong("step 2 returns the same at slots with different pasts, where all slots hold one token and one "
                    "feature, so it does not attend the slot's own key of step 2", 2)  # fmt: skip
    holds, sure, large = attended(run, run.logits)
    exists = run.exists[:, 0, :, None]
    if not large.all():
        step = int(np.argmin(large)) + 1
        message = f"step {step} does not add to the feature of the step before, so keys cannot be told apart from it"
        return verdict.outcome("undecided", message=message, first_step=step)
    wrong = (holds != wanted) & sure & exists
    if wrong.any():
        k, t, j = map(int, np.argwhere(wrong)[0])
        entered = max(j - t + 1, 1)
        which = f"the step-1 key of slot {j}" if entered == 1 else f"the slot's own key of step {entered}"
        does = "attends no key that holds" if wanted[k, t, j] else "attends a key that holds"
        message = f"step {k + 1}, slot {t} {does} the token of slot {j}, as {which} does"
        return verdict.failed(message, ratio=float("inf"), first_step=k + 1, compared=int(sure.sum()))
    undecided = (~sure & exists).sum()
    if undecided:
        count = int(np.broadcast_to(exists, sure.shape).sum())
        message = f"{undecided} of {count} responses drown in the rounding of {run.storage}"
        return verdict.outcome("undecided", message=message, compared=int((sure & exists).sum()))
    return verdict.outcome("pass", ratio=0.0, compared=int((sure & exists).sum()))
