"""The rules of speculative sampling, one drawn token at a time: acceptance, the residual law, the token."""

import numpy as np

from draftconf.reference import sampling
from draftconf.reference.config import Choices
from draftconf.reference.formats import FORMATS, round_to
from draftconf.reference.running_error import Running

from ..judging import outcome as verdict
from ..judging.compare import Mismatch, compare
from ..judging.operands import operand
from .cases import Case, generator, handed_over

GRID = 128  # every probability is a multiple of 1 / GRID: exact in every storage format
BELOW_ONE = 1 - 2.0**-8  # the largest bfloat16 of [0, 1)
RESIDUAL_ROUNDINGS = 16  # of the format in which the residual is computed
#: The relative error of a probability that went through its logarithm, in roundings: |log p| of the rounded logarithm
#: (p >= 1 / GRID), as many again inside an exponential, and one for each of the terms that a softmax adds up.
LOGIT_ROUNDINGS = 32


def laws(seed: int, storage: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """p, q and draws: ordinary, equal, disjoint, one-hot, sparse; at last a draw of 0 for a token with p = 0."""
    rng, cases = generator(seed, "sampling"), []
    for kind in ("ordinary", "equal", "disjoint", "onehot", "sparse") * 8:
        p, q = rng.dirichlet(np.ones(6), 2)
        if kind == "equal":
            q = p
        if kind == "disjoint":
            p, q = np.append(p[:3] / p[:3].sum(), np.zeros(3)), np.append(np.zeros(3), q[:3] / q[:3].sum())
        if kind == "onehot":
            q = np.eye(6)[rng.integers(6)]
        if kind == "sparse":
            p = np.where(np.arange(6) % 2, p, 0) / p[1::2].sum()
        cases.append((_law(p, storage), _law(q, storage), rng.random(3)))
    return [*cases, (np.array([0.0, 0.75, 0.25]), np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.0, 0.5]))]


def _law(p: np.ndarray, storage: str) -> np.ndarray:
    """A law on the grid, of sum exactly 1."""
    steps = np.floor(p * GRID)
    steps[np.argmax(steps)] += GRID - steps.sum()
    return steps / GRID


def check_sampling(subject, case: Case, choices: Choices, policy: str, seed: int, what: str) -> dict:
    """``token``, ``accepted`` or ``residual`` of every law. An accepted token needs no residual: it may be left out."""
    formats = subject.description.policies[policy]
    through_logits = subject.description.sampled_from == "logits"
    worst = verdict.outcome("pass", ratio=0.0)
    for p, q, draw in laws(seed, formats["storage"]):
        draw = np.minimum(round_to(draw, "bfloat16"), BELOW_ONE)  # exact everywhere
        inputs = handed_over({"p": p, "q": q, "draw": draw}, formats["storage"])
        result = subject.call("speculative_sample", config=case.config, choices=choices, policy=policy, inputs=inputs)
        actual = result.outputs.get(what)
        if actual is None:
            if what == "residual" and np.all(result.outputs.get("accepted", False)):
                continue
            return verdict.failed(f"speculative_sample returned no output {what!r}")
        error = law_error(p, q, formats) if through_logits else np.zeros(p.shape)
        one = one_sample(what, actual, p, q, draw, formats, error)
        if one["verdict"] == "fail":
            one["message"] += f"; p = {p.tolist()}, q = {q.tolist()}, draw = {draw.tolist()}"
            given = {"p": p, "q": q, "draw": draw}.items()
            one = verdict.with_operands(one, lambda _, g=given: [operand(k, x, np.arange(x.size)) for k, x in g])
        worst = verdict.worse(worst, one)
    return worst


def unit(formats: dict) -> float:
    """The unit roundoff of the format in which the residual is computed."""
    form = "float32" if formats["accumulate"] in ("tensor-core", "tf32") else formats["accumulate"]
    return FORMATS[form].unit_roundoff


def law_error(p: np.ndarray, q: np.ndarray, formats: dict) -> np.ndarray:
    """What max(p - q, 0) inherits from laws that were handed over as logarithms. [V]."""
    return LOGIT_ROUNDINGS * unit(formats) * (p + q)


def residual_law(residual: np.ndarray, formats: dict, error=0.0) -> Running:
    """The residual law, with a few roundings of the format in which it is computed and ``error`` on top. [V]."""
    slack = RESIDUAL_ROUNDINGS * unit(formats) * residual + error
    return Running(residual, slack, slack)


def one_sample(what: str, actual, p, q, draw, formats: dict, error) -> dict:
    sample = sampling.speculative_sample(p, q, draw)
    left = np.maximum(p - q, 0.0).sum() or 1.0
    inherited = (error + sample.residual * error.sum()) / left
    if what == "residual":
        expected = residual_law(sample.residual, formats, inherited)
        try:
            return verdict.of_comparison(
                f"speculative_sample.{what}", compare(what, actual, expected, "storage", formats)
            )
        except Mismatch as mismatch:
            return verdict.failed(str(mismatch))
    legal = either_way(what, p, q, draw, sample.residual, error, inherited)
    expected = np.asarray(getattr(sample, what)).astype(np.int64)
    if np.shape(actual) == () and int(np.asarray(actual)) in legal:
        expected = np.asarray(actual).astype(np.int64)
    return verdict.of_equality(f"speculative_sample.{what}", np.asarray(actual).astype(np.int64), expected)


def either_way(what: str, p, q, draw, residual, error, inherited) -> set[int]:
    """Answers that are right too, because the draw lies within the laws' inherited error of a step."""
    if not error.any():
        return set()
    proposed = sampling.inverse_cdf(q, draw[0])
    ratio, off = sampling.acceptance(p, q)[proposed], 2 * error[proposed] / q[proposed]
    near = p[proposed] > 0 and abs(draw[1] - ratio) <= off
    if what == "accepted":
        return {0, 1} if near else set()
    around = np.clip(draw[2] + inherited.sum() * np.array([-1, 1]), 0, 1)
    rejected = near or draw[1] >= ratio
    replacements = {sampling.inverse_cdf(residual, u) for u in around} if rejected else set()
    return replacements | ({proposed} if near else set())
