"""Error bounds by running the oracle's own text on numbers that carry their error.

A ``Running`` array holds a float64 value and, componentwise, two accounts of how far an honest implementation in the
declared formats may be from it: ``linear``, the sum of the magnitudes of all roundings carried to here (a worst case),
and ``sigma``, the root of the sum of their squares. Roundings to nearest have no preferred sign, so by Azuma-Hoeffding
the error exceeds lambda sigma with probability at most 2 exp(-lambda^2 / 2). What is not a rounding to nearest (a
discrete choice that could go either way, accumulation that truncates) is carried in a third account, ``drift``, which
is also part of linear. The bound is min(lambda sigma + drift, linear).

Three rules make them (docs/bounds.md derives each):

store      y rounded to a format of unit roundoff u:  u |y| + half its smallest subnormal
reduce     a sum of K products, any order: u sqrt(K R^2 + sum (ab)^2), and linearly K u sum |a b|, where R^2 = S^2 + 2
           sum (ab)^2 with S the largest partial sum in natural order. Accumulation that may truncate (``tensor-core``)
           gets the linear term in both.
propagate  |J| e_in through every operation, first order in sigma, exact in linear where the derivative is not bounded
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from . import mx
from .bounds import CURRENT, GRAIN, LAMBDA
from .config import BLOCK
from .formats import round_to

OPERATIONS = 3  # an implementation may take three operations where the oracle's text takes one
ELEMENTARY = 4  # ulps of exp, log, tanh and the like in public float32 libraries
PREFIXES = 8  # where a product's partial sums are looked at


class Running(np.lib.mixins.NDArrayOperatorsMixin):
    """A float64 array with its error accounts; use it wherever the oracle takes an array.

    ``drift`` is None where it is zero everywhere, which is most of the time.
    """

    __slots__ = ("drift", "linear", "sigma", "value")

    def __init__(self, value, sigma=None, linear=None, drift=None):
        self.value = np.asarray(value, np.float64)
        self.sigma = self._account(0.0 if sigma is None else sigma)
        self.linear = self._account(0.0 if linear is None else linear)
        self.drift = None if drift is None else self._account(drift)

    def _account(self, errors) -> np.ndarray:
        same = np.shape(errors) == self.value.shape
        return errors if same else np.broadcast_to(errors, self.value.shape)

    # Shape, exactly.
    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)

    def __len__(self):
        return len(self.value)

    def __getitem__(self, index):
        return self.each(lambda a: a[index])

    def reshape(self, *shape):
        return self.each(lambda a: a.reshape(*shape))

    def sum(self, axis=None, keepdims=False):
        return _sum(self, axis, keepdims)

    def each(self, function) -> "Running":
        """The same rearrangement of the value and of every account: no error is added."""
        drift = None if self.drift is None else function(self.drift)
        return Running(function(self.value), function(self.sigma), function(self.linear), drift)

    # The rules.
    def bound(self) -> np.ndarray:
        """How far an honest value may be: min(lambda sigma + drift, linear), componentwise."""
        likely = LAMBDA * self.sigma if self.drift is None else LAMBDA * self.sigma + self.drift
        return np.fmin(likely, self.linear)  # where one account overflowed, the other

    def rounded(self, unit: float, grain: float) -> "Running":
        step = unit * np.abs(self.value) + grain
        return Running(self.value, np.hypot(self.sigma, step), self.linear + step, self.drift)

    def stored(self, point) -> "Running":
        """The store rule, unless the operation that made the value rounded to that format anyway."""
        form, compute = CURRENT.get().at(point), CURRENT.get()["accumulate"]
        if form.precision >= compute.precision and form.min_exponent <= compute.min_exponent:
            return self
        return self.rounded(form.unit_roundoff, max(form.smallest_subnormal / 2, GRAIN))

    def quantized(self, form: str, rule: str, source: str) -> "Running":
        """MX fake quantisation of an uncertain value: the largest change over its interval and the block's scales."""
        via = (lambda a: round_to(a, "bfloat16")) if source == "bfloat16" else (lambda a: a)
        near, reach = mx.fake_quantize(self.value, form, rule, source), self.bound()
        grid = (*self.shape[:-1], self.shape[-1] // BLOCK, BLOCK)
        largest = np.abs(via(self.value)).reshape(grid)
        spread = np.zeros(grid)
        for shift in (-1, 1):
            amax = np.maximum(largest + shift * reach.reshape(grid), 0).max(axis=-1, keepdims=True)
            exponent = mx.shared_exponent(amax, form, rule)
            for side in (-1, 1):
                x = via(self.value + side * reach).reshape(grid)
                moved = np.ldexp(mx.round_element(np.ldexp(x, -exponent), form), exponent)
                spread = np.maximum(spread, np.abs(moved - near.reshape(grid)))
        return _drifting(near, np.where(reach > 0, spread.reshape(self.shape), 0.0))

    def below(self, other) -> "Running":
        """theta of the LK gradient: certain where the sign of the difference is, else anything in [0, 1]."""
        gap = self - other
        open_ = np.abs(gap.value) <= gap.bound()
        return _drifting(np.where(open_, 0.5, gap.value < 0), 0.5 * open_)

    # NumPy's protocols.
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if ufunc in _COMPARISONS:
            return ufunc(*(_value(x) for x in inputs), **kwargs)
        handler = _UFUNCS.get(ufunc)
        if method != "__call__" or handler is None or kwargs:
            return NotImplemented
        with np.errstate(all="ignore"):  # an account that overflows says so in the bound
            return handler(*inputs)

    def __array_function__(self, func, types, args, kwargs):
        handler = _FUNCTIONS.get(func)
        with np.errstate(all="ignore"):
            return NotImplemented if handler is None else handler(*args, **kwargs)


def exact(x) -> Running:
    return x if isinstance(x, Running) else Running(x)


def _drifting(value, spread) -> Running:
    return Running(value, None, spread, spread if np.any(spread) else None)


def lifted(values: dict) -> dict:
    """Every float array as an exact ``Running``, so that the first operation on it rounds."""
    real = lambda x: isinstance(x, np.ndarray) and x.dtype.kind == "f"  # noqa: E731
    return {key: Running(x) if real(x) else x for key, x in values.items()}


def _value(x):
    return x.value if isinstance(x, Running) else x


def _computed(value, sigma, carry, operands, units: float = OPERATIONS) -> Running:
    """The result of one operation: its carried error and ``units`` roundings of its own.

    ``carry`` maps worst-case errors of the operands to that of the result; it serves linear and drift alike.
    """
    now = CURRENT.get()
    return Running(value, sigma, *_carried(carry, operands)).rounded(units * now.unit, now.grain)


def _carried(carry, operands) -> tuple:
    """The linear and drift accounts of a result."""
    linear = carry(*(a.linear for a in operands))
    if all(a.drift is None for a in operands):
        return linear, None
    return linear, carry(*(np.zeros(a.shape) if a.drift is None else a.drift for a in operands))


def _add(a, b):
    a, b = exact(a), exact(b)
    return _computed(a.value + b.value, np.hypot(a.sigma, b.sigma), lambda e, f: e + f, (a, b))


def _negative(a):
    return Running(-a.value, a.sigma, a.linear, a.drift)


def _multiply(a, b):
    if a is b:  # a square: the two factors err together
        size = 2 * np.abs(a.value)
        return _computed(a.value**2, size * a.sigma, lambda e: (size + e) * e, (a,))
    a, b = exact(a), exact(b)
    size_a, size_b = np.abs(a.value), np.abs(b.value)
    sigma = np.hypot(size_b * a.sigma, size_a * b.sigma)
    return _computed(a.value * b.value, sigma, lambda e, f: size_b * e + size_a * f + e * f, (a, b))


def _divide(a, b):
    a, b = exact(a), exact(b)
    y, size = a.value / b.value, np.abs(b.value)
    sigma = np.hypot(a.sigma, np.abs(y) * b.sigma) / size
    carry = lambda e, f: np.where(f < size, (e + np.abs(y) * f) / (size - f), np.inf)  # noqa: E731
    return _computed(y, sigma, carry, (a, b))


def _exp(a):
    y = np.exp(a.value)
    grow = lambda e: np.where(y > 0, y * np.expm1(np.minimum(e, 700)), 0.0)  # noqa: E731
    # exp2(x log2 e) rounds its argument: relative 2 |x| units
    units = np.where(np.isfinite(a.value), 2 * np.abs(a.value) + ELEMENTARY, 0.0)
    return _computed(y, grow(a.sigma), grow, (a,), units)


def _log(a):
    carry = lambda e: np.where(e < a.value, -np.log1p(-e / a.value), np.inf)  # noqa: E731
    return _computed(np.log(a.value), a.sigma / a.value, carry, (a,), ELEMENTARY)


def _tanh(a):
    y, size = np.tanh(a.value), np.abs(a.value)
    carry = lambda e: (1 - np.tanh(np.maximum(size - e, 0)) ** 2) * e  # noqa: E731
    return _computed(y, (1 - y * y) * a.sigma, carry, (a,), ELEMENTARY)


def _sqrt(a):
    y = np.sqrt(a.value)
    return _computed(y, a.sigma / (2 * y), lambda e: e / (y + np.sqrt(np.maximum(a.value - e, 0))), (a,))


def _minimum(a, b):
    a, b = exact(a), exact(b)
    spread = lambda e, f: np.maximum(e, f)  # noqa: E731
    return Running(np.minimum(a.value, b.value), spread(a.sigma, b.sigma), *_carried(spread, (a, b)))


def _reduced(value, terms: "Terms", sigma, linear, drift) -> Running:
    """The reduce rule."""
    now, count = CURRENT.get(), terms.count
    if count <= 1:
        return Running(value, sigma, linear, drift).rounded(OPERATIONS * now.unit, now.grain)
    worst = count * now.unit / (1 - count * now.unit) * terms.magnitude + count * now.grain
    if now.truncates:
        return Running(value, sigma, linear + 2 * worst, 2 * worst + (0 if drift is None else drift))
    random = now.unit * np.sqrt(count * terms.partial_squared() + terms.squares) + sqrt(count) * now.grain
    return Running(value, np.hypot(sigma, random), linear + worst, drift)


@dataclass
class Terms:
    """What the reduce rule knows of a sum: how many terms, sum |t|, sum t^2, the largest partial sum met in order."""

    count: int
    magnitude: np.ndarray
    squares: np.ndarray
    prefix: np.ndarray

    def partial_squared(self) -> np.ndarray:
        """R^2: the partial sums of the natural order, or of an order unrelated to the signs; never above (P or N)^2."""
        likely = np.square(self.prefix) + 2 * self.squares
        return np.minimum(likely, np.square((self.magnitude + self.prefix) / 2))


def _sum(a, axis=None, keepdims=False):
    total = lambda x: np.sum(x, axis=axis, keepdims=keepdims)  # noqa: E731
    value, size = total(a.value), np.abs(a.value)
    partial = np.abs(np.cumsum(a.value, axis=axis))
    prefix = partial.max() if axis is None else partial.max(axis=axis, keepdims=keepdims)
    terms = Terms(a.size // max(value.size, 1), total(size), total(np.square(size)), prefix)
    return _reduced(value, terms, _root(total(a.sigma**2)), *_carried(total, (a,)))


def _root(squares):
    return np.sqrt(squares) + GRAIN


def _mean(a, axis=None, keepdims=False):
    total = _sum(a, axis, keepdims)
    return total * (total.size / a.size)


def _matmul(a, b):
    a, b, now = exact(a), exact(b), CURRENT.get()
    if now.product_input:
        a, b = a.rounded(now.product_input, 0.0), b.rounded(now.product_input, 0.0)
    size_a, size_b, value = np.abs(a.value), np.abs(b.value), a.value @ b.value
    terms = Terms(a.shape[-1], size_a @ size_b, size_a**2 @ size_b**2, _largest_prefix(a.value, b.value))
    if not a.linear.any() and not b.linear.any():  # exact factors, as most are in a walk
        return _reduced(value, terms, 0.0, np.zeros(value.shape), None)
    squares = a.sigma**2 @ size_b**2 + size_a**2 @ b.sigma**2
    carry = lambda e, f: e @ size_b + size_a @ f + e @ f  # noqa: E731
    return _reduced(value, terms, _root(squares), *_carried(carry, (a, b)))


def _largest_prefix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest partial sum of a product in its natural order, at the ends of PREFIXES chunks."""
    total, largest = 0.0, 0.0
    for chunk in np.array_split(np.arange(a.shape[-1]), min(PREFIXES, max(a.shape[-1], 1))):
        total = total + a[..., chunk] @ b[..., chunk, :]
        largest = np.maximum(largest, np.abs(total))
    return largest


def _max(a, axis=None, keepdims=False):
    return a.each(lambda x: np.max(x, axis=axis, keepdims=keepdims))


def _together(function, parts) -> Running:
    """One array function of several arrays, on the values and on every account."""
    drift = None
    if any(p.drift is not None for p in parts):
        drift = function([np.zeros(p.shape) if p.drift is None else p.drift for p in parts])
    return Running(*(function([getattr(p, s) for p in parts]) for s in ("value", "sigma", "linear")), drift)


def _joined(function):
    return lambda arrays, axis=0: _together(lambda x: function(x, axis=axis), [exact(a) for a in arrays])


def _where(condition, a, b):
    return _together(lambda x: np.where(condition, x[0], x[1]), [exact(a), exact(b)])


_UFUNCS = {
    np.add: _add,
    np.subtract: lambda a, b: _add(a, _negative(exact(b))),
    np.negative: _negative,
    np.multiply: _multiply,
    np.divide: _divide,
    np.exp: _exp,
    np.log: _log,
    np.tanh: _tanh,
    np.sqrt: _sqrt,
    np.minimum: _minimum,
    np.matmul: _matmul,
}
_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
_FUNCTIONS = {
    np.sum: _sum,
    np.mean: _mean,
    np.max: _max,
    np.concatenate: _joined(np.concatenate),
    np.stack: _joined(np.stack),
    np.where: _where,
    np.swapaxes: lambda a, i, j: a.each(lambda x: np.swapaxes(x, i, j)),
    np.broadcast_to: lambda a, shape: a.each(lambda x: np.broadcast_to(x, shape)),
    np.take_along_axis: lambda a, index, axis: a.each(lambda x: np.take_along_axis(x, index, axis)),
    np.real: lambda a: a.value,
    np.shape: lambda a: a.shape,
    np.zeros_like: lambda a: np.zeros(a.shape),
}
