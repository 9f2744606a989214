"""The primitives every stage is made of, each forward directly above its backward.

Weights are ``[out, in]`` and applied as ``x @ W.T``. ``d_y`` is the cotangent of the output ``y``, ``d_x`` that of the
input ``x``. Everything here is plain NumPy, so the same text also runs on complex numbers (complex-step derivatives)
and on the error-carrying numbers of ``reference.running_error``.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .formats import store


class Op(NamedTuple):
    """A stage's arithmetic: ``forward(*inputs) -> y`` and ``backward(*inputs, y, d_y) -> one cotangent per input``."""

    forward: Callable
    backward: Callable


def no_gradient(*arguments) -> tuple:
    """The backward of a lookup or a decision: no input gets a cotangent."""
    return (None,) * (len(arguments) - 2)


def linear(x, weight):
    """y = x W^T. x [..., in], weight [out, in] -> [..., out]."""
    return x @ np.swapaxes(weight, -1, -2)


def linear_backward(x, weight, d_y):
    """d_x = d_y W; d_W = d_y^T x, summed over all rows."""
    rows, d_rows = x.reshape(-1, x.shape[-1]), d_y.reshape(-1, d_y.shape[-1])
    return d_y @ weight, np.swapaxes(d_rows, 0, 1) @ rows


LINEAR = Op(linear, lambda x, weight, y, d_y: linear_backward(x, weight, d_y))


def _inverse_rms(x, eps: float):
    return 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(x, weight, eps: float):
    """y = w x / sqrt(mean(x^2) + eps) over the last axis (spec.md section 4)."""
    return weight * store(x * _inverse_rms(x, eps), "normalized")


def rms_norm_backward(x, weight, eps: float, d_y):
    """With r = (mean(x^2) + eps)^(-1/2), n = r x and g = w d_y:

    dr/dx_j = -r^3 x_j / d, so d_x = r (g - n mean(g n)); d_w = sum of d_y n over rows.
    """
    r = _inverse_rms(x, eps)
    n, g = store(x * r, "normalized"), store(weight * d_y, "normalized")
    d_x = r * (g - n * np.mean(g * n, axis=-1, keepdims=True))
    return d_x, (d_y * n).reshape(-1, x.shape[-1]).sum(axis=0)


def norm(eps: float) -> Op:
    return Op(lambda x, w: rms_norm(x, w, eps), lambda x, w, y, d_y: rms_norm_backward(x, w, eps, d_y))


def sigmoid(x):
    """1 / (1 + exp(-x)), accurate on both sides and never overflowing."""
    positive = np.real(x) >= 0
    e = np.exp(np.where(positive, -x, x))
    return np.where(positive, 1.0, e) / (1.0 + e)


def sigmoid_backward(y, d_y):
    """d_x = d_y y (1 - y)."""
    return d_y * y * (1.0 - y)


def situ_glu(gate, up, beta: float, linear_beta: float):
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta) (report eq. 12 and 19)."""
    return (beta * np.tanh(gate / beta) * sigmoid(gate)) * (linear_beta * np.tanh(up / linear_beta))


def situ_glu_backward(gate, up, beta: float, linear_beta: float, d_y):
    """With t = tanh(gate/beta), s = sigmoid(gate), v = tanh(up/linear_beta):

    d_gate = d_y linear_beta v ((1 - t^2) s + beta t s (1 - s)); d_up = d_y beta t s (1 - v^2).
    """
    t, s, v = np.tanh(gate / beta), sigmoid(gate), np.tanh(up / linear_beta)
    d_gate = d_y * (linear_beta * v) * ((1.0 - t * t) * s + beta * t * s * (1.0 - s))
    d_up = d_y * (beta * t * s) * (1.0 - v * v)
    return d_gate, d_up


def situ(beta: float, linear_beta: float) -> Op:
    return Op(
        lambda gate, up: situ_glu(gate, up, beta, linear_beta),
        lambda gate, up, y, d_y: situ_glu_backward(gate, up, beta, linear_beta, d_y),
    )


def log_softmax(x):
    """x - log sum exp x over the last axis; finite whenever the differences of x are."""
    z = x - np.max(x, axis=-1, keepdims=True)
    return z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))


def softmax(x):
    """exp(x) / sum exp(x) over the last axis; -inf entries get exactly 0."""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)
