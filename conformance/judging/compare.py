"""Comparing what an implementation returned with what the oracle computed, in units of the derived bound.

Every comparison is written ``not (error <= bound)``, so that a NaN fails it. A wrong shape or dtype is a fault of its
own, never a broadcast.
"""

from dataclasses import dataclass

import numpy as np

from draftconf.reference.bounds import Arithmetic
from draftconf.reference.running_error import Running, exact

from .operands import bits

VANISHING = 1e-30  # a bound of underflow grains alone, on a quantity that is exactly zero


class Mismatch(Exception):
    """An output that cannot be compared: missing, of another shape or kind. The sentence says which and what."""


@dataclass
class Comparison:
    """The worst element of one array. ``ratio`` is error / bound there; above 1 (or NaN in the error) is a fault."""

    ratio: float
    compared: int
    index: tuple = ()
    actual: float = 0.0
    expected: float = 0.0
    bound: float = 0.0
    form: str = ""  # that the implementation stores it in

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    def worst(self, step: int | None = None) -> dict:
        """JSON-safe; the two values also in hexadecimal, exactly, and those of a fault as their format stores them."""
        error = abs(self.actual - self.expected)
        element = {
            "step": step, "index": [int(i) for i in self.index], "actual": float(self.actual),
            "expected": float(self.expected), "error": float(error), "bound": float(self.bound),
            "actual_hex": float(self.actual).hex(), "expected_hex": float(self.expected).hex(),
        }  # fmt: skip
        if self.ok or not bits(self.actual, self.form):
            return element
        stored = {"actual_bits": bits(self.actual, self.form), "expected_bits": bits(self.expected, self.form)}
        return element | {"format": self.form} | stored


def as_floats(name: str, actual, shape: tuple) -> np.ndarray:
    """``actual`` as float64 of exactly ``shape``. Raises Mismatch."""
    array = np.asarray(actual)
    if array.dtype.kind not in "fiub":
        raise Mismatch(f"{name} has dtype {array.dtype}; wanted real numbers")
    if array.shape != shape:
        raise Mismatch(f"{name} has shape {array.shape}; wanted {shape}")
    return array.astype(np.float64)


def allowance(expected: Running, point, formats: dict) -> np.ndarray:
    """The bound of a recorded value: what was carried to it, then its rounding to the format of ``point``."""
    carried, form, compute = expected.bound(), Arithmetic(formats).at(point), Arithmetic(formats)["accumulate"]
    if form.precision >= compute.precision:
        return carried
    with np.errstate(invalid="ignore", over="ignore"):
        return carried + form.unit_roundoff * (np.abs(expected.value) + carried) + form.smallest_subnormal / 2


def compare(name: str, actual, expected, point, formats: dict, valid: np.ndarray | None = None) -> Comparison:
    """Componentwise: |actual - expected| against the bound, where ``valid`` (broadcast from the left) is true."""
    expected = exact(expected)
    actual = as_floats(name, actual, expected.shape)
    bound = allowance(expected, point, formats)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.abs(actual - expected.value)
        same = (actual == expected.value) | (error == 0)
        ratio = np.where(same, 0.0, np.where(bound > 0, error / bound, np.inf))
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    ratio = np.where(np.isnan(bound) & np.isfinite(actual), 0.0, ratio)  # nothing known: see is_decisive
    if valid is not None:
        ratio = np.where(valid.reshape(valid.shape + (1,) * (ratio.ndim - valid.ndim)), ratio, 0.0)
    if ratio.size == 0:
        return Comparison(0.0, 0)
    index = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    count = ratio.size if valid is None else int(valid.sum()) * (ratio.size // valid.size)
    form = Arithmetic(formats).at(point).name
    return Comparison(float(ratio[index]), count, index, actual[index], expected.value[index], bound[index], form)


def width(expected: Running, point, formats: dict) -> float:
    """The bound relative to the quantity, in the 2-norm: how much the comparison could miss."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        bound, size = np.linalg.norm(allowance(expected, point, formats)), np.linalg.norm(expected.value)
        relative = bound / size if size > 0 else (0.0 if bound < VANISHING else np.inf)
    return float(relative) if np.isfinite(relative) else float("inf")
