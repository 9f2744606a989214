"""Checks without a tolerance: MX codes and values byte for byte, and alignment."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from draftconf.reference import mx
from draftconf.reference.config import BLOCK, Choices
from draftconf.reference.formats import FORMATS, round_to
from draftconf.reference.unroll import align

from ..judging import outcome as verdict
from ..judging.operands import of_block, operand
from ..judging.shrink import minimize
from ..protocol.keys import SILENT
from ..protocol.result import AdapterError, NotOffered
from .cases import Case, generator, handed_over

#: MX cases. In the last four OCP MX v1.0 is silent and spec.md section 6 decides (policy names of mx.md section 1).
MX_CASES = {
    "normal": "blocks of every size from 2^-100 to 2^100",
    "ties": "elements halfway between two grid values, both ways from even",
    "edges": "block maxima at, just below and just above powers of two and the largest element",
    "signs": "negative zeros, single values, alternating signs",
    "zero_block": "all-zero blocks get scale code 0 (P1)",
    "nonfinite": "a NaN or an infinity makes its block NaN, scale code 255 (P2)",
    "clamp": "exponents below -127 are clamped and the elements rounded there (P3)",
    "subnormal": "subnormal inputs count as they are (P5)",
}


def next_up(x: np.ndarray, storage: str) -> np.ndarray:
    """The neighbour above, on the storage grid (positive normal x)."""
    _, exponent = np.frexp(x)
    return x + np.ldexp(1.0, exponent - FORMATS[storage].precision)


def next_down(x: np.ndarray, storage: str) -> np.ndarray:
    half, exponent = np.frexp(x)
    return x - np.ldexp(1.0, exponent - FORMATS[storage].precision - (half == 0.5))


def mx_blocks(case: str, form: str, storage: str, rng: np.random.Generator) -> np.ndarray:
    """[n, 32] on the storage grid."""
    element, lowest = mx.ELEMENTS[form], FORMATS[storage].min_exponent
    grid = np.unique(np.abs(mx.decode_table(form)))
    grid = grid[np.isfinite(grid)]
    if case == "normal":
        x = rng.normal(size=(48, BLOCK)) * 2.0 ** rng.integers(-100, 100, (48, 1))
    elif case == "ties":
        x = rng.choice((grid[1:] + grid[:-1]) / 2, (32, BLOCK)) * rng.choice([-1, 1], (32, BLOCK))
        x[:, 0] = 2.0**element.emax  # scale exponent 0 under floor
        x *= 2.0 ** rng.integers(-20, 20, (32, 1))
    elif case == "edges":
        exponents = np.arange(-90, 100, 7)
        tops = np.concatenate([2.0**exponents, element.largest * 2.0 ** (exponents - element.emax)])
        tops = np.concatenate([tops, next_up(tops, storage), next_down(tops, storage)])
        x = rng.uniform(-1, 1, (len(tops), BLOCK)) * tops[:, None]
        x[:, 5] = tops
    elif case == "signs":
        x = np.zeros((8, BLOCK))
        x[0], x[1, 3], x[2, 3] = -0.0, 1.0, -1.0
        x[3] = np.where(np.arange(BLOCK) % 2, 1.0, -1.0)
        x[4] = np.where(np.arange(BLOCK) % 3 == 0, -1e-9, 1.0)
        x[5], x[5, 0] = -0.0, 3.0
        x[6:] = np.ldexp(1.0, -2 * np.arange(2 * BLOCK).reshape(2, BLOCK)) * [
            [1.0],
            [-1.0],
        ]  # far below their block's scale
        x[6:, 0] = 1.5
    elif case == "zero_block":
        x = np.zeros((2, BLOCK))
        x[1] = -0.0
    elif case == "nonfinite":
        x = rng.normal(size=(6, BLOCK))
        x[0, 3], x[1, 0], x[2, 31], x[3, 1], x[4, 2] = np.nan, np.inf, -np.inf, np.nan, np.inf
        x[3, 2], x[4, 3] = np.inf, -np.inf
    elif case == "clamp":
        x = rng.normal(size=(16, BLOCK)) * 2.0 ** (lowest + rng.integers(0, 8, (16, 1))) if storage != "float64" else (
            rng.normal(size=(16, BLOCK)) * 2.0 ** rng.integers(-131, -117, (16, 1)))  # fmt: skip
    else:
        tiny = FORMATS[storage].smallest_subnormal
        x = rng.integers(-60, 60, (8, BLOCK)) * tiny
    x = round_to(x, storage)
    return np.where(np.isinf(x) & (case != "nonfinite"), 0.0, x)


@dataclass
class MXRun:
    """One quantise, decode or fake-quantise call."""

    subject: object
    method: str  # mxfp4, mxfp8, and the same with _decode or behind fake_
    case_name: str
    case: Case
    choices: Choices
    policy: str
    seed: int

    @property
    def form(self) -> str:
        return "mxfp4" if "mxfp4" in self.method else f"mxfp8_{self.choices.mxfp8_element}"

    @property
    def storage(self) -> str:
        return self.subject.description.policies[self.policy]["storage"]

    @cached_property
    def x(self) -> np.ndarray:
        return mx_blocks(self.case_name, self.form, self.storage, generator(self.seed, self.method, self.case_name))

    def call(self, inputs: dict, cotangents=None):
        return self.subject.call(
            self.method, config=self.case.config, choices=self.choices, policy=self.policy, inputs=inputs,
            cotangents=cotangents,
        )  # fmt: skip

    def quantized(self, x: np.ndarray):
        return mx.quantize(round_to(x, "bfloat16") if self.choices.quantize_source == "bfloat16" else x, self.form,
                           self.choices.mx_scale_rule)  # fmt: skip

    def operands(self, index: tuple, of_scale: bool = False) -> list[dict]:
        return of_block(self.x, self.quantized(self.x)[0], index, of_scale)

    @cached_property
    def encoded(self):
        return self.call(handed_over({"x": self.x}, self.storage))

    @cached_property
    def all_codes(self) -> dict:
        """Every scale byte with every element code: [256, codes padded to blocks]."""
        count = 16 if self.form == "mxfp4" else 256
        codes = np.broadcast_to(np.arange(max(count, BLOCK)) % count, (256, max(count, BLOCK))).astype(np.uint8)
        scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], codes.shape[1] // BLOCK, axis=1)
        return {"scales": scales, "codes": codes}


def check_encoding(run: MXRun, what: str) -> dict:
    """``scales`` or ``codes`` of a quantiser, byte for byte; codes of a NaN block are nobody's business."""
    if excused(run):
        return verdict.not_offered(f"declared otherwise in mx_silent; OCP is silent here: {MX_CASES[run.case_name]}")
    actual = run.encoded.outputs.get(what)
    if actual is None:
        return verdict.failed(f"{run.method} returned no output {what!r}; wanted scales and codes")
    scales, codes = run.quantized(run.x)
    ignore = None if what == "scales" else np.repeat(scales == mx.NAN_SCALE, BLOCK, axis=-1)
    found = verdict.of_equality(f"{run.method}.{what}", actual, scales if what == "scales" else codes, ignore)
    if found["verdict"] == "fail" and np.shape(actual) == (scales if what == "scales" else codes).shape:
        with suppress(AdapterError, NotOffered):  # the call that was judged did come back
            found["message"] += "; smallest input: " + smallest_block(run, what)
        if run.case_name in SILENT:
            found["message"] += f" (OCP is silent here; spec.md section 6: {MX_CASES[run.case_name]})"
    return verdict.with_operands(found, lambda index: run.operands(index, what == "scales"))


def excused(run: MXRun) -> bool:
    return run.case_name in run.subject.description.mx_silent


def smallest_block(run: MXRun, what: str) -> str:
    """The failing block with every element zeroed that the fault does not need, in hexadecimal floats."""

    def wrong(block: np.ndarray) -> bool:
        theirs = run.call(handed_over({"x": block[None]}, run.storage)).outputs[what]
        scales, codes = run.quantized(block[None])
        return not np.array_equal(theirs, scales if what == "scales" else codes)

    scales, codes = run.quantized(run.x)
    ours, theirs = (scales if what == "scales" else codes), np.asarray(run.encoded.outputs[what])
    row = int(np.argwhere((theirs != ours).reshape(len(run.x), -1).any(axis=1))[0, 0])
    block = run.x[row]
    only = lambda kept: np.where(np.isin(np.arange(BLOCK), kept), block, 0.0)  # noqa: E731
    kept = [i for i, v in enumerate(block) if v != 0 or np.signbit(v)] or [0]
    try:
        if not wrong(block):
            return f"block {row}, together with the others only"
        kept = minimize(kept, lambda trial: wrong(only(trial)))
    except NotOffered:  # the answers were read from files, so nothing else can be tried
        pass
    return f"x = {{{', '.join(f'{i}: {float(block[i]).hex()}' for i in kept)}}} of {BLOCK}, others 0"


def outside_range(values: np.ndarray, storage: str) -> tuple[np.ndarray, np.ndarray]:
    """Where a storage format has no normal number for a value: below its range, but for zero, and beyond it."""
    tiny = (values != 0) & (np.abs(values) < 2.0 ** FORMATS[storage].min_exponent)
    return tiny, np.abs(values) > FORMATS[storage].largest


def check_decoding(run: MXRun) -> dict:
    """All scale bytes with all codes; 255 is NaN.

    A value that the output's format lacks may be rounded to it: beyond its range to infinity, below to zero.
    """
    inputs = dict(run.all_codes)
    if run.form == "mxfp4":
        inputs["packed"] = mx.pack(inputs["codes"])
    actual = run.call(inputs).outputs.get("values")
    if actual is None:
        return verdict.failed(f"{run.method} returned no output 'values'")
    expected = mx.dequantize(inputs["scales"], inputs["codes"], run.form)
    actual, ignore = np.asarray(actual), np.zeros(expected.shape, bool)
    if actual.shape == expected.shape:
        tiny, beyond = outside_range(expected, run.storage)
        stored = np.abs(actual) == np.abs(round_to(expected, run.storage))
        ignore = (tiny & (stored | (actual == 0))) | (beyond & (stored | np.isinf(actual)))
    found = verdict.of_equality(f"{run.method}.values", actual, expected, ignore)
    return verdict.with_operands(found, lambda index: decoded(inputs, index))


def decoded(inputs: dict, index: tuple) -> list[dict]:
    """The code of an element and the scale byte of its block."""
    row, column = index
    return [operand("codes", inputs["codes"], [index]), operand("scales", inputs["scales"], [(row, column // BLOCK)])]


def check_fake(run: MXRun, what: str) -> dict:
    """``y`` of a fake quantiser exactly, and its straight-through gradient."""
    if excused(run):
        return verdict.not_offered(f"declared otherwise in mx_silent; OCP is silent here: {MX_CASES[run.case_name]}")
    d_y = round_to(generator(run.seed, run.method, "d").normal(size=run.x.shape), run.storage)
    given = handed_over({"x": run.x, "d": d_y}, run.storage)
    result = run.call({"x": given["x"]}, {"y": given["d"]})
    rule, source = run.choices.mx_scale_rule, run.choices.quantize_source
    if what == "y":
        expected = mx.fake_quantize(run.x, run.form, rule, source)
        actual = result.outputs.get("y")
        if actual is None:
            return verdict.failed(f"{run.method} returned no output 'y'")
        largest = FORMATS["float32"].largest if run.storage != "float64" else np.inf
        found = verdict.of_equality(f"{run.method}.y", actual, expected, np.abs(expected) > largest)
        return verdict.with_operands(found, run.operands)
    if result.grads.get("x") is None:
        return verdict.not_offered(f"{run.method} returned no gradient")
    expected = mx.fake_quantize_backward(run.x, run.form, rule, source, run.choices.ste, d_y)
    found = verdict.of_equality(f"{run.method}: d x", result.grads["x"], expected)
    return verdict.with_operands(found, lambda index: [*run.operands(index), operand("d_y", d_y, [index])])


# -- alignment --------------------------------------------------------------------------------------------------------


def raw_sequence(case: Case, storage: str, seed: int, documents: bool) -> dict:
    """One raw sequence of 13 tokens with a ragged mask, two documents and padding."""
    rng, c, n = generator(seed, "align"), case.config, 13
    raw = {"tokens": rng.integers(0, c.vocab_size, n).astype(np.int32), "mask": rng.random(n) < 0.7}
    raw["mask"][[2, 6]], raw["mask"][[1, 7]] = False, True  # ragged, whatever the seed
    raw |= {name: round_to(rng.normal(size=(n, c.hidden_size)), storage) for name in ("low", "mid", "high")}
    raw["target_logits"] = round_to(rng.normal(size=(n, c.vocab_size)), storage)
    if documents:
        raw["documents"] = np.where(np.arange(n) < 5, 4, np.where(np.arange(n) < 11, 2, -1)).astype(np.int32)
    return raw


def check_align(subject, case: Case, choices: Choices, policy: str, seed: int, what: str, documents: bool) -> dict:
    """A slot array or ``supervised``, exactly. Slots that no step may read are not compared."""
    storage = subject.description.policies[policy]["storage"]
    raw = raw_sequence(case, storage, seed, documents)
    result = subject.call("align", config=case.config, choices=choices, policy=policy, inputs=handed_over(raw, storage))
    expected = align(raw, case.config, choices)
    if result.outputs.get(what) is None:
        return verdict.failed(f"align returned no output {what!r}")
    actual, wanted = np.asarray(result.outputs[what]), np.asarray(expected[what])
    if what in ("tokens", "target_logits", "mask") and actual.shape == wanted.shape and documents:
        crossing = np.append(raw["documents"][1:], -1) != raw["documents"]
        ignore = np.broadcast_to(crossing.reshape((-1,) + (1,) * (wanted.ndim - 1)), wanted.shape)
        return verdict.of_equality(f"align.{what}", actual, wanted, ignore)
    return verdict.of_equality(f"align.{what}", actual, wanted)
