"""What the oracle answers to a vector, how far from it an answer may be, and which decisions are legal.

Everything comes from the objects that the checks judge with, so that the files and a verdict cannot disagree.
"""

from dataclasses import replace

import numpy as np

from draftconf.reference import mx
from draftconf.reference.bounds import arithmetic
from draftconf.reference.config import BLOCK
from draftconf.reference.formats import FORMATS, store
from draftconf.reference.running_error import Running, exact, lifted
from draftconf.reference.unroll import draft_sequence

from ..checks.cases import Case, cases_for
from ..checks.exact import MXRun, outside_range
from ..checks.losses import loss_row
from ..checks.sampling import residual_law
from ..checks.stage import GRADIENT_POINTS, StageRun, differentiable, log_ratio
from ..checks.stages import FIRST, STEP, Stage, row_of
from ..checks.unroll import UnrollRun
from ..judging.compare import allowance
from ..judging.decisions import selection_scores
from ..protocol.description import Description
from ..protocol.losses import LOSSES
from ..protocol.result import Result
from .record import DECISION, GRAD, TRACE, Oracle, Vector, answer_arrays

BOUND, ALTERNATIVE, IGNORE = "bound/", "alternative/", "ignore/"
LOWEST, HIGHEST, EITHER = "lowest/", "highest/", "either/"
END_TO_END = ("tame", "poisoned")  # the cases that are compared with the oracle's own run


class Expected(Oracle):
    """The oracle as the subject of the checks' own objects; of the unroll without its trace, which needs no walk."""

    def __init__(self, description: Description):
        super().__init__(description)
        self.last = Result({})

    def call(self, method, **given) -> Result:
        self.last = super().call(method, **given)
        return replace(self.last, trace={}) if method == "unroll" else self.last


def case_of(vector: Vector) -> Case:
    cases = {case.name: case for case in cases_for(vector.choices)}
    poisoned = replace(cases["tame"], name="poisoned", poison=float("nan"))
    return {"poisoned": poisoned, **cases}.get(vector.case.removesuffix(FIRST), cases["tame"])


def expect(vector: Vector, subject: Expected, seed: int, full: bool = False) -> tuple[dict, dict]:
    """The arrays of an answer, and of the file of expected values, which has their bounds and legal sets too.

    Unless ``full``, what makes most of the bytes is left out.
    """
    answer = subject.call(
        vector.method, config=vector.config, choices=vector.choices, policy=vector.policy, inputs=vector.inputs,
        cotangents=vector.cotangents or None,
    )  # fmt: skip
    answer = answer_arrays(subject.last if vector.method == "unroll" else answer)
    if stage := row(vector, subject.description):
        found = of_stage(vector, stage, subject, seed, answer)
    elif vector.method == "unroll":
        found = of_unroll(vector, subject, seed, answer)
    elif vector.method == "draft_sequence":
        found = of_draft_sequence(vector, subject)
    else:
        found = answer | EXACT.get(vector.method, lambda *_: {})(vector, subject, answer)
    found = {name: x for name, x in found.items() if full or not is_bulk(name, x, vector.case)}
    return answer, {name: stored(name, x) for name, x in found.items()}


def is_bulk(name: str, x: np.ndarray, case: str) -> bool:
    """Gradients of weight matrices and recorded values of other cases than tame; recorded cotangents of every case."""
    matrix = GRAD in name and name.endswith(".weight") and x.ndim > 1
    recorded = name.startswith(TRACE) or "/" in name.partition(DECISION)[2]
    return (name.startswith(TRACE) and name.endswith(".grad")) or ((matrix or recorded) and case != "tame")


def stored(name: str, x) -> np.ndarray:
    """Bounds in float32, rounded up: a bound is no secret to its last digit."""
    x = np.asarray(x)
    if not name.startswith(BOUND):
        return x
    x = np.where(np.isnan(x), np.inf, x)  # behind a decision that may go either way nothing is known
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float32)
    return np.where(narrow < x, np.nextafter(narrow, np.float32(np.inf)), narrow)


def bounded(name: str, expected: Running, point, formats: dict) -> dict:
    """A value and its bound."""
    return {name: exact(expected).value, BOUND + name: allowance(exact(expected), point, formats)}


# -- stages ----------------------------------------------------------------------------------------------------------


def row(vector: Vector, description: Description) -> Stage | None:
    """The row that the vector's method is judged by; None for a method that has none."""
    if vector.method in LOSSES:
        return loss_row(vector.method, description.losses)
    return row_of(vector.method, int(vector.inputs.get("step", STEP)))


def of_stage(vector: Vector, stage: Stage, subject: Expected, seed: int, answer: dict) -> dict:
    case = case_of(vector)
    run = StageRun(subject, stage, case, vector.choices, vector.policy, seed)
    found = {}
    for name, key in stage.outputs.items():
        found |= bounded(name, run.oracle.expected[key], key, run.formats)
    for name in differentiable(stage, vector.choices, case)[0]:
        point = GRADIENT_POINTS.get(name, "gradient")
        found |= gradient(GRAD + name, run.oracle.expected_gradient(name), point, run.formats)
    for name, key in stage.decisions.items():
        node = next((node for node in run.nodes if node.key == key), None)
        if node is not None:
            found |= legal(name, node, run, answer)
    return found


def gradient(name: str, expected: Running, point, formats: dict) -> dict:
    """In float32 unless storage is float64, with what that rounds added to the bound: most of a file is gradients."""
    found = bounded(name, expected, point, formats)
    if formats["storage"] == "float64":
        return found
    with np.errstate(over="ignore"):
        narrow = found[name].astype(np.float32)
    return {name: narrow, BOUND + name: found[BOUND + name] + np.abs(narrow - found[name])}


def legal(name: str, node, run: StageRun, answer: dict) -> dict:
    """A decision and what else would be right."""
    if name == "below":
        gap = log_ratio(run)
        return {DECISION + name: gap.value < 0, EITHER + DECISION + name: np.abs(gap.value) <= gap.bound()}
    if name == "experts":
        with arithmetic(run.formats):
            scores = store(run.expected[node.inputs[0]], node.inputs[0])
        key, error = selection_scores(scores, exact(run.graph_inputs()[node.inputs[1]]).value, run.formats)
        name = DECISION + name
        return {name: answer[name], LOWEST + name: key - error, HIGHEST + name: key + error}
    if f"{DECISION}{name}.codes" not in answer:  # the choices leave it unquantised
        return {}
    with arithmetic(run.formats):
        value = exact(store(run.expected[node.key], node.key))
    parts = {f"{DECISION}{name}.{part}": answer[f"{DECISION}{name}.{part}"] for part in ("scales", "codes")}
    return parts | {f"value/{DECISION}{name}": value.value, f"{BOUND}{DECISION}{name}": value.bound()}


# -- the unroll ------------------------------------------------------------------------------------------------------


def of_unroll(vector: Vector, subject: Expected, seed: int, answer: dict) -> dict:
    """End to end with bounds, and what the oracle records, without: it is judged along what was recorded instead."""
    found = {name: narrow(x) for name, x in answer.items() if name.startswith((DECISION, TRACE))}
    if vector.case not in END_TO_END:
        return found | {name: x for name, x in answer.items() if "/" not in name}
    run = UnrollRun(subject, case_of(vector), vector.choices, vector.policy, seed)
    values, grads, steps = run.oracle["values"], run.oracle["grads"], range(1, vector.config.num_steps + 1)
    found |= bounded("total_loss", values[(0, "total_loss")], (0, "total_loss"), run.formats)
    for name, key in (("step_losses", "step_loss"), ("slot_losses", "lk_loss")):
        together = np.stack([exact(values[(k, key)]) for k in steps])
        found |= bounded(name, together, (1, key), run.formats)
    found[IGNORE + "slot_losses"] = ~np.stack([values[(k, "supervised")] for k in steps])
    for name, d in grads.items():
        found |= gradient(GRAD + name, d, "gradient", run.formats)
    return found


def narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.kind == "f" else x


def of_draft_sequence(vector: Vector, subject: Expected) -> dict:
    formats = subject.description.policies[vector.policy]
    with arithmetic(formats):
        drafted = draft_sequence(*_split(vector), vector.config, vector.choices)
    logits, features = (exact(x) for x in drafted)
    found = bounded("logits", logits, (1, "logits"), formats)
    return found | bounded("features", features, (1, "layer_output"), formats)


def _split(vector: Vector) -> tuple:
    arrays = {n: x.astype(float) if x.dtype.kind == "f" else x for n, x in vector.inputs.items()}
    prefix = {n: arrays.pop(n) for n in ("tokens", "low", "mid", "high", "given")}
    return lifted(arrays), lifted(prefix)


# -- exact methods ---------------------------------------------------------------------------------------------------


def of_encoding(vector: Vector, subject: Expected, answer: dict) -> dict:
    """Codes of a block that holds a NaN or an infinity are not compared."""
    run = MXRun(subject, vector.method, vector.case, None, vector.choices, vector.policy, 0)
    scales, codes = run.quantized(vector.inputs["x"].astype(float))
    return {"scales": scales, "codes": codes, IGNORE + "codes": np.repeat(scales == mx.NAN_SCALE, BLOCK, axis=-1)}


def of_decoding(vector: Vector, subject: Expected, answer: dict) -> dict:
    """Infinity for a value beyond the storage format's range, zero for one below its normal numbers."""
    values = answer["values"]
    tiny, beyond = outside_range(values, subject.description.policies[vector.policy]["storage"])
    other = np.where(tiny, 0.0, np.where(beyond, np.copysign(np.inf, values), values))
    return {ALTERNATIVE + "values": other}


def of_fake(vector: Vector, subject: Expected, answer: dict) -> dict:
    """What float32 cannot hold is not compared."""
    storage = subject.description.policies[vector.policy]["storage"]
    largest = FORMATS["float32"].largest if storage != "float64" else np.inf
    return {IGNORE + "y": np.abs(answer["y"]) > largest}


def of_align(vector: Vector, subject: Expected, answer: dict) -> dict:
    """What a slot at the end of its document would read of the next one is not compared."""
    documents = vector.inputs.get("documents")
    if documents is None:
        return {}
    crossing = np.append(documents[1:], -1) != documents
    shaped = lambda x: np.broadcast_to(crossing.reshape((-1,) + (1,) * (x.ndim - 1)), x.shape)  # noqa: E731
    return {IGNORE + name: shaped(answer[name]) for name in ("tokens", "target_logits", "mask")}


def of_sampling(vector: Vector, subject: Expected, answer: dict) -> dict:
    formats = subject.description.policies[vector.policy]
    return bounded("residual", residual_law(answer["residual"], formats), "storage", formats)


EXACT = {
    "mxfp4": of_encoding, "mxfp8": of_encoding, "mxfp4_decode": of_decoding, "mxfp8_decode": of_decoding,
    "fake_mxfp4": of_fake, "fake_mxfp8": of_fake, "align": of_align, "speculative_sample": of_sampling,
}  # fmt: skip
