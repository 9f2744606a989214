"""Floating-point formats: unit roundoffs, rounding to a format, and the places where an implementation may round.

The oracle itself never rounds: it works in float64. ``store`` marks in its text where an implementation writes a
value to memory in a narrower format; on plain arrays it is the identity, and on the error-carrying numbers of
``reference.running_error`` it adds that rounding.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format: ``precision`` counts the implicit bit; ``min_exponent`` is that of the smallest normal."""

    name: str
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.precision

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def largest(self) -> float:
        return (2 - 2.0 ** (1 - self.precision)) * 2.0**self.max_exponent


FORMATS = {
    f.name: f
    for f in (
        Format("float64", 53, -1022, 1023),
        Format("float32", 24, -126, 127),
        Format("tf32", 11, -126, 127),
        Format("bfloat16", 8, -126, 127),
        Format("float16", 11, -14, 15),
        Format("tensor-core", 24, -126, 127),  # float32 accumulation that may truncate: see bounds
    )
}


def round_to(x: np.ndarray, name: str) -> np.ndarray:
    """The nearest value of the named format, half to even, as float64; beyond the largest value, infinity."""
    form, x = FORMATS[name], np.asarray(x, np.float64)
    if name == "float64":
        return x
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent - 1, form.min_exponent) - form.precision + 1
    y = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    return np.where(np.abs(y) > form.largest, np.copysign(np.inf, x), y)


def store(x, point="storage"):
    """``x`` itself: a place where an implementation may round to the format it declares for ``point``.

    ``point`` names an internal place of a stage, or is the key of a value of ``reference.graph``.
    """
    return x.stored(point) if hasattr(x, "stored") else x
