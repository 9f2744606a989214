"""Null adapters: they answer every method with the right names and shapes and know nothing. None may get through.

What such an answer gets right by chance is listed in POWER.md; a method that it could offer without failing a single
check would be a method that is not checked.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ..protocol.result import Result
from ..protocol.subject import Subject


def zeros(x: np.ndarray, inputs: Mapping) -> np.ndarray:
    return np.zeros_like(x)


def ones(x: np.ndarray, inputs: Mapping) -> np.ndarray:
    return np.ones_like(x)


def permuted(x: np.ndarray, inputs: Mapping) -> np.ndarray:
    """Rows moved by one along the first axis that has two; a single number doubled."""
    long = [axis for axis, size in enumerate(x.shape) if size > 1]
    return np.roll(x, 1, long[0]) if long else (~x if x.dtype == bool else 2 * x + 1)


def an_input(x: np.ndarray, inputs: Mapping) -> np.ndarray:
    """The first input of this shape and kind, else zeros."""
    fitting = (y for y in inputs.values() if np.shape(y) == x.shape and np.asarray(y).dtype.kind == x.dtype.kind)
    return np.array(next(fitting, np.zeros_like(x)), x.dtype)


class Null(Subject):
    """``fast`` with every array of its answers replaced by ``change(array, inputs)``."""

    def __init__(self, wrapped: Subject, change: Callable[[np.ndarray, Mapping], np.ndarray]):
        super().__init__(wrapped.adapter)
        self.change = change

    def call(self, method: str, *, inputs, **keywords) -> Result:
        true = super().call(method, inputs=inputs, **keywords)
        return Result(*(self.replaced(part, inputs) for part in parts(true)))

    def replaced(self, part: Mapping, inputs: Mapping) -> dict:
        return {name: None if x is None else self.change(np.asarray(x), inputs) for name, x in part.items()}


ALWAYS_THE_SAME = ("mxfp4_decode", "mxfp8_decode")  # their one case holds all codes, so the answer before is right


class Previous(Subject):
    """Every answer is that of the call before it of the same method with arrays of the same shapes.

    Run it once on another seed first, so that there is one.
    """

    def __init__(self, wrapped: Subject):
        super().__init__(wrapped.adapter)
        self.memory: dict = {}

    def offers(self, method: str) -> bool:
        return method not in ALWAYS_THE_SAME and super().offers(method)

    def call(self, method: str, *, inputs, **keywords) -> Result:
        key = (method, keywords["policy"], *((name, np.shape(x)) for name, x in inputs.items()))
        true = super().call(method, inputs=inputs, **keywords)
        former, self.memory[key] = self.memory.get(key), true
        return true if former is None else former


def parts(result: Result) -> tuple:
    return result.outputs, result.grads, result.decisions, result.trace


NULLS: dict[str, Callable[[Subject], Subject]] = {
    "zeros": lambda subject: Null(subject, zeros),
    "ones": lambda subject: Null(subject, ones),
    "permuted rows": lambda subject: Null(subject, permuted),
    "inputs returned": lambda subject: Null(subject, an_input),
    "previous case": Previous,
}
