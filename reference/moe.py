"""Stable LatentMoE with MX experts, and the dense MLP of layout eagle3 (report sections 2.3 and 4.1.4, eq. 11-13).

Routed arrays are per pair: [B, T, n, .] in the order of ``experts`` int [B, T, n]. Expert weights are stacked,
[E, out, in]; ``mx.straight_through`` has put them on the MXFP4 grid and the inputs of their products on the MXFP8 one.
"""

import numpy as np

from .formats import store
from .ops import Op, linear, linear_backward, sigmoid, sigmoid_backward


def router_scores(x, gate):
    """s = sigmoid(gate x) (report eq. 13). x [B, T, d], gate [E, d] -> [B, T, E]."""
    return sigmoid(store(linear(x, gate), "router"))


def router_scores_backward(x, gate, y, d_y):
    return linear_backward(x, gate, sigmoid_backward(y, d_y))


ROUTER_SCORES = Op(router_scores, router_scores_backward)


def top_experts(scores, bias, count: int) -> np.ndarray:
    """The ``count`` experts with the largest score + bias, lowest id first among equals. int32 [B, T, n]."""
    return np.argsort(-(np.real(scores) + np.real(bias)), axis=-1, kind="stable")[..., :count].astype(np.int32)


def route(scores, experts, factor: float, epsilon: float):
    """Weights s_i / (sum of the chosen s + epsilon) times the factor; the bias never enters. -> [B, T, n]."""
    chosen = np.take_along_axis(scores, experts, axis=-1)
    return chosen / (np.sum(chosen, axis=-1, keepdims=True) + epsilon) * factor


def route_backward(scores, experts, factor: float, epsilon: float, y, d_y):
    """With S = sum of the chosen s + epsilon and w = factor s / S: d_s = (factor d_w - sum(d_w w)) / S."""
    chosen = np.take_along_axis(scores, experts, axis=-1)
    total = np.sum(chosen, axis=-1, keepdims=True) + epsilon
    d_chosen = (d_y * factor - np.sum(d_y * y, axis=-1, keepdims=True)) / total  # [B, T, n]
    hit = experts[..., None] == np.arange(scores.shape[-1])  # [B, T, n, E]
    return np.where(hit, d_chosen[..., None], 0.0).sum(axis=-2), None


def route_op(factor: float, epsilon: float) -> Op:
    return Op(
        lambda scores, experts: route(scores, experts, factor, epsilon),
        lambda scores, experts, y, d_y: route_backward(scores, experts, factor, epsilon, y, d_y),
    )


def by_expert(experts: np.ndarray, count: int):
    """The routed pairs sorted by expert: their order, and the slice of each expert in it."""
    order = np.argsort(experts.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(experts.reshape(-1), minlength=count))
    return order, [slice(end - size, end) for size, end in zip(np.diff(ends, prepend=0), ends, strict=True)]


def expert_product(x, experts, weight):
    """W_e x for every routed pair. x [B, T, n, in], weight [E, out, in] -> [B, T, n, out]."""
    order, slices = by_expert(experts, len(weight))
    rows = x.reshape(-1, x.shape[-1])[order]
    y = np.concatenate([linear(rows[s], weight[e]) for e, s in enumerate(slices)], axis=0)
    return y[np.argsort(order)].reshape(*experts.shape, weight.shape[1])


def expert_product_backward(x, experts, weight, d_y):
    """Each expert's product backward on its own rows; an expert without rows gets exactly zero."""
    order, slices = by_expert(experts, len(weight))
    rows, d_rows = x.reshape(-1, x.shape[-1])[order], d_y.reshape(-1, d_y.shape[-1])[order]
    pairs = [linear_backward(rows[s], weight[e], d_rows[s]) for e, s in enumerate(slices)]
    d_x = np.concatenate([d for d, _ in pairs], axis=0)[np.argsort(order)].reshape(x.shape)
    return d_x, np.stack([d for _, d in pairs])


def to_pairs(x, experts):
    """A token's latent, once for each of its experts. [B, T, l] -> [B, T, n, l]."""
    return np.broadcast_to(x[..., None, :], (*experts.shape, x.shape[-1]))


def first_product(x, experts, weight):
    """W1 or W3 on the quantised latent. x [B, T, l] -> [B, T, n, m]."""
    return expert_product(to_pairs(x, experts), experts, weight)


def first_product_backward(x, experts, weight, y, d_y):
    d_pairs, d_weight = expert_product_backward(to_pairs(x, experts), experts, weight, d_y)
    return store(store(d_pairs).sum(axis=-2)), None, d_weight  # each use of the latent may be rounded


FIRST_PRODUCT = Op(first_product, first_product_backward)


def second_product_backward(x, experts, weight, y, d_y):
    d_x, d_weight = expert_product_backward(x, experts, weight, d_y)
    return d_x, None, d_weight


SECOND_PRODUCT = Op(expert_product, second_product_backward)


def weighted(x, weights):
    """The routing weight on the expert's hidden, for ``routing_weight`` before_down. [B, T, n, m]."""
    return x * weights[..., None]


def weighted_backward(x, weights, y, d_y):
    return d_y * weights[..., None], np.sum(d_y * x, axis=-1)


WEIGHTED = Op(weighted, weighted_backward)


def combine(outputs, weights):
    """u = sum over the chosen experts of weight x output (report eq. 11). [B, T, n, l] -> [B, T, l]."""
    return np.sum(store(outputs * weights[..., None], "expert_sum"), axis=-2)


def combine_backward(outputs, weights, y, d_y):
    return d_y[..., None, :] * weights[..., None], np.sum(d_y[..., None, :] * outputs, axis=-1)


COMBINE = Op(combine, combine_backward)


def plain_sum(outputs):
    """The sum over the chosen experts when the weight was applied before the down projection."""
    return np.sum(outputs, axis=-2)


PLAIN_SUM = Op(plain_sum, lambda outputs, y, d_y: (np.broadcast_to(d_y[..., None, :], outputs.shape),))


def layer_output(residual, shared, latent, up_proj):
    """f' = x1 + shared_experts + routed_expert_up_proj latent. -> [B, T, d]."""
    return residual + store(shared + store(linear(latent, up_proj)))


def layer_output_backward(residual, shared, latent, up_proj, y, d_y):
    return d_y, d_y, *linear_backward(latent, up_proj, d_y)


LAYER_OUTPUT = Op(layer_output, layer_output_backward)

ADD = Op(lambda a, b: a + b, lambda a, b, y, d_y: (d_y, d_y))
