"""Microscaling formats: blocks of 32 values that share a power-of-two scale (OCP MX v1.0, sections 5 and 6.3).

Formats: ``mxfp4`` (E2M1), ``mxfp8_e4m3``, ``mxfp8_e5m2``. Scale rules (spec.md section 6): ``floor`` (OCP), ``rceil``,
``ceil``, ``even``. Where OCP is silent: an all-zero block gets scale code 0, exponents are clamped to [-127, 127], a
block with a NaN or an infinity gets scale code 255 (NaN), -0 stays -0, subnormal inputs count as they are.
"""

from typing import NamedTuple

import numpy as np

from .config import BLOCK
from .formats import round_to
from .ops import Op

NAN_SCALE = 255
SCALE_BIAS = 127


class Element(NamedTuple):
    """An element format; ``largest`` its largest finite magnitude, ``emax`` the exponent of that value."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    largest: float

    @property
    def emin(self) -> int:
        return 1 - self.bias


ELEMENTS = {
    "mxfp4": Element(2, 1, 1, 2, 6.0),
    "mxfp8_e4m3": Element(4, 3, 7, 8, 448.0),
    "mxfp8_e5m2": Element(5, 2, 15, 15, 57344.0),
}


def _element(form: str) -> Element:
    if form not in ELEMENTS:
        raise ValueError(f"format is {form!r}; wanted one of {', '.join(ELEMENTS)}")
    return ELEMENTS[form]


def _blocks(x: np.ndarray) -> np.ndarray:
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x has shape {x.shape}; wanted a last axis that is a multiple of {BLOCK}")
    return x.reshape(*x.shape[:-1], -1, BLOCK)  # [..., n, 32]


def shared_exponent(amax: np.ndarray, form: str, rule: str) -> np.ndarray:
    """The block's scale exponent from the largest magnitude: its own exponent less emax, plus the rule's step.

    amax = m 2^E with 1 <= m < 2, both read from the bits. rceil steps when m exceeds the largest element's significand,
    ceil when m > 1, even when m rounds up to 2 at the element's precision (half to even). Clamped to [-127, 127].
    """
    element = _element(form)
    half, exponent = np.frexp(amax)
    m = 2.0 * half
    steps = {
        "floor": np.zeros(amax.shape, bool),
        "rceil": m > element.largest / 2.0**element.emax,
        "ceil": m > 1.0,
        "even": m >= 2.0 - 2.0 ** -(element.mantissa_bits + 1),
    }
    if rule not in steps:
        raise ValueError(f"rule is {rule!r}; wanted one of {', '.join(steps)}")
    return np.clip(exponent - 1 - element.emax + steps[rule], -SCALE_BIAS, SCALE_BIAS)


def round_element(x: np.ndarray, form: str) -> np.ndarray:
    """The nearest value of the element format, half to even, saturating; -0 and tiny negatives give -0."""
    element = _element(form)
    exponent = np.maximum(np.frexp(x)[1] - 1, element.emin) - element.mantissa_bits
    return np.clip(np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent), -element.largest, element.largest)


def encode_element(y: np.ndarray, form: str) -> np.ndarray:
    """The bits of values that lie on the grid: sign, exponent field, mantissa field. uint8."""
    element = _element(form)
    magnitude, sign = np.abs(y), np.signbit(y)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, element.emin)
    exponent = np.where(magnitude == 0, element.emin, exponent)
    significand = np.ldexp(magnitude, element.mantissa_bits - exponent).astype(np.int64)  # with the implicit bit
    code = significand + ((exponent - element.emin) << element.mantissa_bits)
    return (code + (sign << (element.exponent_bits + element.mantissa_bits))).astype(np.uint8)


def decode_table(form: str) -> np.ndarray:
    """The value of every code, float64: 16 entries for mxfp4, 256 for mxfp8 (E4M3: 0x7F is NaN; E5M2: as IEEE)."""
    element = _element(form)
    codes = np.arange(2 ** (1 + element.exponent_bits + element.mantissa_bits))
    mantissa = codes & (2**element.mantissa_bits - 1)
    field = (codes >> element.mantissa_bits) & (2**element.exponent_bits - 1)
    significand = mantissa + np.where(field > 0, 2**element.mantissa_bits, 0)
    values = np.ldexp(significand.astype(float), np.maximum(field, 1) - element.bias - element.mantissa_bits)
    if form == "mxfp8_e4m3":
        values[(codes & 0x7F) == 0x7F] = np.nan
    if form == "mxfp8_e5m2":
        values[field == 31] = np.where(mantissa[field == 31] == 0, np.inf, np.nan)
    return np.where(codes >> (element.exponent_bits + element.mantissa_bits), -values, values)


def quantize(x: np.ndarray, form: str, rule: str = "floor") -> tuple[np.ndarray, np.ndarray]:
    """x [..., 32 n] -> scales uint8 [..., n] and codes uint8 [..., 32 n], one code a byte."""
    blocks = _blocks(np.asarray(x, np.float64))
    finite = np.isfinite(blocks).all(axis=-1)  # [..., n]
    blocks = np.where(finite[..., None], blocks, 0.0)
    amax = np.abs(blocks).max(axis=-1, initial=0.0)
    exponent = shared_exponent(amax, form, rule)
    y = round_element(np.ldexp(blocks, -exponent[..., None]), form)
    scales = np.where(amax > 0, exponent + SCALE_BIAS, 0)
    return np.where(finite, scales, NAN_SCALE).astype(np.uint8), encode_element(y, form).reshape(np.shape(x))


def dequantize(scales: np.ndarray, codes: np.ndarray, form: str) -> np.ndarray:
    """Element value times 2^(scale - 127), exact in float64; scale 255 makes its whole block NaN."""
    table = decode_table(form)
    if codes.size and codes.max() >= len(table):
        raise ValueError(f"codes holds {int(codes.max())}; wanted codes below {len(table)} for {form}")
    values = np.ldexp(_blocks(table[codes]), scales.astype(np.int64)[..., None] - SCALE_BIAS)
    return np.where(scales[..., None] == NAN_SCALE, np.nan, values).reshape(codes.shape)


def pack(codes: np.ndarray) -> np.ndarray:
    """Two MXFP4 codes a byte, the even index in the low nibble. uint8 [..., 2 n] -> [..., n]."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes has a last axis of {codes.shape[-1]}; wanted an even length")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: np.ndarray) -> np.ndarray:
    """The inverse of ``pack``. uint8 [..., n] -> [..., 2 n]."""
    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def fake_quantize(x, form: str, rule: str = "floor", source: str = "stored"):
    """dequantize(quantize(x)), in float64; ``source`` "bfloat16" rounds x to bfloat16 first (spec.md section 9)."""
    if hasattr(x, "quantized"):
        return x.quantized(form, rule, source)
    x = round_to(x, "bfloat16") if source == "bfloat16" else x
    return dequantize(*quantize(x, form, rule), form)


def fake_quantize_backward(x, form: str, rule: str, source: str, ste: str, d_y):
    """Straight through: d_x = d_y; with ``clipped``, zero where abs(x) > largest 2^exponent strictly."""
    if ste == "identity":
        return d_y
    x = np.real(x)
    x = round_to(x, "bfloat16") if source == "bfloat16" else x
    scales, _ = quantize(x, form, rule)
    limit = np.ldexp(_element(form).largest, scales.astype(np.int64) - SCALE_BIAS)
    inside = np.abs(_blocks(x)) <= limit[..., None]
    return np.where(inside.reshape(x.shape), d_y, 0.0)


def straight_through(form: str, rule: str, source: str, ste: str) -> Op:
    return Op(
        lambda x: fake_quantize(x, form, rule, source),
        lambda x, y, d_y: (fake_quantize_backward(x, form, rule, source, ste, d_y),),
    )
