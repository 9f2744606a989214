"""Checks of an EAGLE-3 step whose layer is not K3's: its losses, their sum, and the gradient of that sum.

The losses are judged on the logits that were returned, as exact inputs, against the declaration; the gradient against
difference quotients of the total loss that was returned.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from draftconf.reference.bounds import Arithmetic, arithmetic
from draftconf.reference.formats import round_to
from draftconf.reference.loss import total_loss
from draftconf.reference.ops import softmax
from draftconf.reference.running_error import Running, exact
from draftconf.reference.unroll import FEATURES, outside_document, shift, step_inputs

from ..judging import outcome as verdict
from ..judging.compare import Mismatch, compare
from ..protocol.pattern import DENOMINATORS, LOSSES, Pattern
from .cases import generator
from .pattern import PatternRun, Wrong, judged

SIZES = [2.0**-i for i in range(1, 14)]  # of a step along a direction, relative to the features
SAMPLES, SPREAD = 6, 4.0  # runs on neighbours of the inputs, and how many times their spread a loss may be off by
UNLIKELY = 16.0  # times the spread of runs on the same inputs
CONVERGES = 0.7  # of the last change of a quotient, at most, is the next one where halving the step still helps
GRADIENT_ROUNDINGS = 16  # of the storage format that an element of a gradient may be off by
SHARPNESS = 0.1  # an error below a tenth of the slope decides
NEAR = 1e-5  # a step loss this close to what another alignment gives is taken to be that


def expected(run: PatternRun, inputs: dict, logits: np.ndarray) -> list[tuple[Running, np.ndarray]]:
    """The declared loss of every step with its error, and which slots count, by the oracle's own alignment."""
    aligned, found = step_inputs(inputs, run.case.config, run.choices), []
    with arithmetic(run.formats):
        for k in range(1, run.steps + 1):
            supervised = aligned[(k, "supervised")]
            draft = np.where(run.exists[k - 1][..., None], logits[k - 1], 0.0)
            losses = run.declared.slot_losses(Running(draft), Running(aligned[(k, "target_logits")]))
            found.append((exact(run.declared.step_loss(losses, supervised)), supervised))
    return found


@judged
def check_losses(run: PatternRun) -> dict:
    """Every step's loss is the declared one of its logits against target and mask of position j + k."""
    return judge_losses(run, run.inputs, run.base())


def judge_losses(run: PatternRun, inputs: dict, answer) -> dict:
    found, logits, given = None, run.read(answer), np.asarray(answer.outputs["step_losses"], float)
    for k, (wanted, supervised) in enumerate(expected(run, inputs, logits), start=1):
        what = f"step_losses[{k - 1}]"
        try:
            comparison = compare(what, given[k - 1], wanted, (k, "step_loss"), run.formats)
        except Mismatch as mismatch:
            raise Wrong(str(mismatch), k) from mismatch
        one = verdict.of_comparison(what, comparison) | {"compared": max(int(supervised.sum()), 1)}
        if one["verdict"] == "fail":
            theirs = np.nan_to_num(np.asarray(answer.outputs["logits"][k - 1], float))
            message = f"step {k}: {one['message']}{recognised(run, inputs, theirs, k, given[k - 1])}"
            return one | {"first_step": k, "message": message}
        found = one if found is None else verdict.worse(found, one)
    return found


def recognised(run: PatternRun, inputs: dict, logits: np.ndarray, k: int, given: float) -> str:
    """What the loss would be right for, with as few differences as will do: other shifts of target or mask, another
    reduction, another loss.
    """
    shifts, declared = range(-1, run.steps + 1), run.declared
    options = product(LOSSES, DENOMINATORS, [*shifts, None], shifts)
    wanted = (declared.loss, declared.denominator, k - 1, k - 1)
    differing = lambda option: sum(a != b for a, b in zip(option, wanted, strict=True))  # noqa: E731
    near = lambda option: sum(abs((s or 0) - (k - 1)) for s in option[2:])  # noqa: E731
    for option in sorted(options, key=lambda o: (differing(o), near(o))):
        loss, divisor, masked, shifted = option
        supervised = run.exists[k - 1] if masked is None else moved(run, inputs["mask"], masked)
        other = Pattern(loss, declared.step_weights, divisor, declared.epsilon)
        losses = other.slot_losses(logits, moved(run, inputs["target_logits"], shifted))
        value = float(other.step_loss(losses, supervised))
        if abs(value - given) <= NEAR * abs(value):
            told = [f"the target shifted by {shifted}; wanted {k - 1}"] * (shifted != k - 1)
            if masked != k - 1:
                told += ["no mask" if masked is None else f"the mask shifted by {masked}; wanted {k - 1}"]
            told += [f"the loss {loss}; declared is {declared.loss}"] * (loss != declared.loss)
            told += [f"the denominator {divisor}; declared is {declared.denominator}"] * (
                divisor != declared.denominator
            )
            return f"; it is right for {', '.join(told)}"
    return ""


def moved(run: PatternRun, x: np.ndarray, count: int) -> np.ndarray:
    """x [B, T, ...] moved ``count`` slots to the left, or to the right; zero where that leaves the document."""
    outside = outside_document(run.inputs.get("documents"), count + 1, x.shape[:2])
    x = shift(x, count) if count >= 0 else np.roll(x, -count, axis=1)
    return np.where(outside.reshape(outside.shape + (1,) * (x.ndim - 2)), np.zeros((), x.dtype), x)


@judged
def check_total(run: PatternRun) -> dict:
    """The total is the sum of the returned step losses times the declared weights."""
    outputs, weights = run.base().outputs, run.declared.step_weights
    if len(weights) != run.steps:
        raise Wrong(f"describe()['pattern']['step_weights'] has {len(weights)} numbers; wanted {run.steps}")
    steps = np.asarray(outputs["step_losses"], float)
    with arithmetic(run.formats):
        wanted = exact(total_loss(list(weights)).forward(*(Running(x) for x in steps)))
    found = verdict.of_comparison(
        "total_loss", compare("total_loss", outputs["total_loss"], wanted, (0, "total_loss"), run.formats)
    )
    if found["verdict"] == "fail":
        total, ones = float(outputs["total_loss"]), np.arange(run.steps)
        others = {"equal weights of 1": ones * 0 + 1, "equal weights that sum to 1": (ones * 0 + 1) / run.steps}
        others |= {f"weights {d}^(k-1)": d**ones for d in (0.8, 0.9)} | {
            f"weights {d}^k": d ** (ones + 1) for d in (0.8, 0.9)
        }
        others |= {f"{name}, over their sum": w / w.sum() for name, w in list(others.items())[2:]}
        for name, w in others.items():
            if abs(float(w @ steps) - total) <= NEAR * abs(total):
                found["message"] += f"; it is right for {name}"
                break
    return found


@judged
def check_mask(run: PatternRun) -> dict:
    """Targets of slots that the mask leaves out move no loss; a step without a supervised slot has loss 0."""
    out = ~run.inputs["mask"]
    rng, other = generator(run.seed, "unsupervised"), dict(run.inputs)
    noise = round_to(4 * rng.normal(size=run.inputs["target_logits"].shape), run.storage)
    other["target_logits"] = np.where(out[..., None], noise, run.inputs["target_logits"])
    losses = lambda result: np.asarray(result.outputs["step_losses"], float)  # noqa: E731
    base = losses(run.base())
    repeats = [losses(run.call(run.inputs)) - base]
    if repeats[0].any():  # no two runs are alike: stochastic rounding, sums in any order
        repeats += [losses(run.call(run.inputs)) - base for _ in range(SAMPLES - 1)]
    reach = UNLIKELY * np.sqrt(np.mean(np.square(repeats), axis=0))
    wrong = ~(np.abs(losses(run.call(other)) - base) <= reach)
    if wrong.any():
        k = int(np.argmax(wrong)) + 1
        raise Wrong(f"step {k}: targets at slots that the mask leaves out move its loss", k)
    return verdict.outcome("pass", ratio=0.0, compared=run.steps)


@judged
def check_empty(run: PatternRun) -> dict:
    """Only the first slots supervised, so that the later steps have none: losses 0, and nothing that is not finite."""
    few = dict(run.inputs)
    few["mask"] = run.inputs["mask"] & (np.arange(run.inputs["mask"].shape[1]) < 3)
    answer = run.call(few, gradients=True)
    for name, x in {**answer.outputs, **answer.grads}.items():
        if name != "logits" and x is not None and not np.isfinite(np.asarray(x, float)).all():
            raise Wrong(f"{name} is not finite where steps 4 to {run.steps} have no supervised slot")
    return judge_losses(run, few, answer)


# -- the gradient ------------------------------------------------------------------------------------------------------


@dataclass
class Slope:
    """Along one direction: what the returned gradient says, what the losses say, and how sure that is."""

    returned: float
    measured: float
    error: float
    scale: float
    steps: np.ndarray  # the measured slope of every step's loss, times its weight

    @property
    def decisive(self) -> bool:
        return self.error <= SHARPNESS * self.scale

    @property
    def wrong(self) -> bool:
        return abs(self.returned - self.measured) > 2 * self.error

    @property
    def ratio(self) -> float:
        """The difference over twice its error; infinite for one where losses that never move leave no error."""
        apart = abs(self.returned - self.measured)
        return apart / (2 * self.error) if self.error else (float("inf") if apart else 0.0)


def loss_noise(run: PatternRun) -> float:
    """How far rounding may move the total loss: its spread on inputs whose every feature is a neighbour of the given
    one, and its own last place.
    """
    rng, base, found = generator(run.seed, "neighbours"), float(run.base().outputs["total_loss"]), [0.0]
    for _ in range(SAMPLES):
        near = {n: run.inputs[n] * (1 + 2 * run.unit * rng.choice([-1, 1], run.inputs[n].shape)) for n in FEATURES}
        result = run.call(run.inputs | {name: round_to(x, run.storage) for name, x in near.items()})
        found.append(abs(float(result.outputs["total_loss"]) - base))
    return SPREAD * max(found) + abs(base) * Arithmetic(run.formats).unit


def slope(run: PatternRun, gradient: dict, direction: dict, noise: float) -> Slope:
    """The difference quotient of that of a row of step sizes whose estimated error is smallest.

    The error of a quotient: the range of it and the two of larger steps, if they converge, and over the step the noise,
    the bends of the loss and the roundings of the gradient.
    """
    size = np.sqrt(np.mean([np.square(run.inputs[name]) for name in FEATURES]))
    root = np.sqrt(np.mean([np.square(direction[name]) for name in FEATURES]))
    square = sum(float(np.square(direction[name]).sum()) for name in FEATURES)
    best, quotients = None, []
    for relative in SIZES:
        step = relative * size / root
        ends = [{n: round_to(run.inputs[n] + s * direction[n], run.storage) for n in FEATURES} for s in (step, -step)]
        high, low = (run.call(run.inputs | end).outputs for end in ends)
        apart = {n: ends[0][n] - ends[1][n] for n in FEATURES}
        length = sum(float((direction[n] * apart[n]).sum()) for n in FEATURES) / square
        total, steps = (
            (np.asarray(high[name], float) - np.asarray(low[name], float)) / length
            for name in ("total_loss", "step_losses")
        )
        quotients.append(float(total))
        blur = 2 * noise / abs(length)
        if len(quotients) > 2 and converging(quotients, blur):
            returned = sum(float((gradient[n] * apart[n]).sum()) for n in FEATURES) / length
            bends = kinks(run, high["logits"], low["logits"])
            error = np.ptp(quotients[-3:]) + blur + (bends + rounding(run, gradient, apart)) / abs(length)
            if best is None or error < best.error:
                best = Slope(returned, float(total), float(error), 0.0, np.array(run.declared.step_weights) * steps)
        if best is not None and blur > best.error:
            break
    best = best or Slope(np.nan, np.nan, np.inf, 0.0, steps)
    norm = np.sqrt(sum(float(np.square(gradient[n]).sum()) for n in FEATURES))
    best.scale = max(abs(best.measured), norm * np.sqrt(square / sum(gradient[n].size for n in FEATURES)))
    return best


def kinks(run: PatternRun, *ends: np.ndarray) -> float:
    """How far min(p, q) in the total loss bends between the given inputs and the two ends: where the lesser of the two
    is another one at an end, by their difference there.
    """
    if run.declared.loss not in ("lk", "tv"):
        return 0.0
    aligned, found = step_inputs(run.inputs, run.case.config, run.choices), 0.0
    here = run.read(run.base())
    for k, weight in enumerate(run.declared.step_weights, start=1):
        p, supervised = softmax(aligned[(k, "target_logits")]), aligned[(k, "supervised")]
        q = softmax(here[k - 1])
        alpha = np.minimum(p, q).sum(-1) if run.declared.loss == "lk" else np.ones(supervised.shape)
        for end in ends:
            there = softmax(np.where(run.exists[k - 1][..., None], np.asarray(end[k - 1], float), 0.0))
            bend = np.where((there < p) != (q < p), np.abs(there - p), 0.0).sum(-1) / alpha
            found += weight * float(run.declared.step_loss(bend, supervised))
    return found


def converging(quotients: list[float], blur: float) -> bool:
    before, now = np.abs(np.diff(quotients[-3:]))
    return bool(now <= CONVERGES * before + 2 * blur)


def rounding(run: PatternRun, gradient: dict, apart: dict) -> float:
    """What the roundings of the returned gradient may make of its product with ``apart``: independent ones, and one
    that all elements share.
    """
    terms = np.concatenate([(gradient[n] * apart[n]).ravel() for n in FEATURES])
    return run.unit * (GRADIENT_ROUNDINGS * float(np.linalg.norm(terms)) + abs(float(terms.sum())))


@judged
def check_gradient(run: PatternRun) -> dict:
    """The gradient of the total loss on low, mid and high against its difference quotients."""
    grads = run.base().grads
    if run.choices.detach_between_steps:
        return verdict.not_offered("declared is detach_between_steps, whose gradient is not that of the total loss")
    absent = [name for name in FEATURES if grads.get(name) is None]
    if len(absent) == len(FEATURES):
        return verdict.not_offered("pattern returned no gradient of low, mid and high")
    if absent:
        raise Wrong(f"the gradient of {absent[0]} is absent; wanted an array")
    gradient = {name: np.asarray(grads[name], float) for name in FEATURES}
    for name, x in gradient.items():
        if x.shape != run.inputs[name].shape or not np.isfinite(x).all():
            raise Wrong(f"the gradient of {name} has shape {x.shape} or is not finite; wanted {run.inputs[name].shape}")
    rng = generator(run.seed, "direction")
    random = {name: rng.normal(size=x.shape) for name, x in gradient.items()}
    own = gradient if any(x.any() for x in gradient.values()) else random
    noise = loss_noise(run)
    slopes = [slope(run, gradient, own, noise), slope(run, gradient, random, noise)]
    for one in slopes:
        if one.wrong:
            return verdict.failed(missing_share(run, one), ratio=one.ratio, compared=3)
    if not any(one.measured for one in slopes):
        raise Wrong("the total loss does not move with low, mid and high")
    worst = max(float(np.nan_to_num(one.ratio)) for one in slopes)
    if not slopes[0].decisive:
        sure = "does not converge" if np.isinf(slopes[0].error) else (
            f"is sure to {slopes[0].error / slopes[0].scale:.2g} of itself only")  # fmt: skip
        message = f"the difference quotient {sure}, in {run.storage}"
        return verdict.outcome("undecided", message=message, ratio=worst, compared=3)
    return verdict.outcome("pass", ratio=worst, compared=3)


def missing_share(run: PatternRun, slope: Slope) -> str:
    """Which steps' share the returned slope lacks, as far as it can be told."""
    told = f"along one direction the gradient returned says {slope.returned:.4g}, the losses {slope.measured:.4g}"
    close = lambda shares: abs(slope.returned - sum(shares)) <= 2 * slope.error  # noqa: E731
    if not slope.returned:
        return f"{told}: no gradient arrives at all"
    for last in range(1, run.steps):
        if close(slope.steps[:last]):
            lacking = f"the share of steps {last + 1} to {run.steps} is missing"
            return f"{told}: that is the share of steps 1 to {last}; {lacking}"
    for k in range(1, run.steps + 1):
        if close(np.delete(slope.steps, k - 1)):
            return f"{told}: the share of step {k} is missing"
    shares = ", ".join(f"{share:.3g}" for share in slope.steps)
    return f"{told} (of steps 1 to {run.steps}: {shares}): part of what flows between the steps is missing or doubled"
