"""A coherent error over many elements: what the componentwise comparison cannot see."""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from draftconf.reference.bounds import FAILURE_PROBABILITY, Arithmetic
from draftconf.reference.running_error import Running

BIAS_TESTS = 2**12  # no run makes more bias tests
BIAS_LIMIT = sqrt(2 * log(2 * BIAS_TESTS / FAILURE_PROBABILITY))
ROUNDED_CONSTANTS = 2  # a stage uses at most so many constants that are rounded to the accumulation format
BIAS_ELEMENTS = 1000  # fewer say nothing about a coherent error


@dataclass
class Bias:
    """A coherent error: the least-squares slope of the signed error on the value, in standard errors.

    Independent roundings average out; an epsilon outside the root, a mean over d - 1 or truncation do not. Rows are
    clusters (equal rows one), and the variance is the larger of the model's and that seen between clusters.
    """

    slopes: list
    variances: list
    coherent: float = 0.0  # what rounded constants (a scale, 1/d, an epsilon) may add: they err alike in every row
    elements: int = 0

    @classmethod
    def empty(cls) -> "Bias":
        return cls([], [])

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def add(self, actual: np.ndarray, expected: Running, point, formats: dict, valid: np.ndarray | None) -> None:
        keep = slice(None) if valid is None else valid.reshape(-1)
        rows = lambda a: np.asarray(a, float).reshape(-1, a.shape[-1] if valid is None else _row(a, valid))[keep]  # noqa: E731
        y, e = rows(expected.value), rows(actual - expected.value)
        form = Arithmetic(formats).at(point)
        variance = (rows(np.square(expected.sigma)) + np.square(form.unit_roundoff * y)) / 3
        first = distinct_rows(y)  # equal rows, as of repeated padding, err together
        y, e, variance = y[first], e[first], variance[first]
        usable = np.isfinite(e) & np.isfinite(variance) & (variance > 0)
        weight = np.divide(y, variance, out=np.zeros_like(y), where=usable)
        self.slopes.append((np.where(usable, e, 0) * weight).sum(-1))
        self.variances.append((y * weight).sum(-1))
        self.coherent += ROUNDED_CONSTANTS * Arithmetic(formats).unit * float((y * weight).sum())
        self.elements += int(usable.sum())

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def z(self) -> float | None:
        """Standard errors from zero; None where there are too few elements to say."""
        if self.elements <= BIAS_ELEMENTS:
            return None
        slopes, variances = np.concatenate(self.slopes), np.concatenate(self.variances)
        total = float(np.sum(variances))
        if total == 0 or len(slopes) < 2:
            return 0.0
        around = slopes - variances * (np.sum(slopes) / total)  # what the common slope leaves of each cluster
        spread = max(total, float(np.sum(np.square(around))) * len(slopes) / (len(slopes) - 1))
        slope = float(np.sum(slopes))
        excess = np.copysign(max(abs(slope) - self.coherent, 0.0), slope)
        return float(excess / np.sqrt(spread))


def distinct_rows(y: np.ndarray) -> np.ndarray:
    """Index of the first of every set of equal rows, told apart by one irrational combination of their entries."""
    weights = np.sqrt(np.arange(2, y.shape[-1] + 2))
    return np.unique(np.nan_to_num(y) @ weights, return_index=True)[1]


def _row(a: np.ndarray, valid: np.ndarray) -> int:
    return a.size // valid.size
