"""Losses between the target's law p and the draft's law q that other trainers of draft models use, and their gradients.

Kimi K3's step has none of them, only the LK loss (report section 4.1.4; loss.py). They are here to judge trainers that
do. All are of the draft's logits and log p [..., V], the target frozen.
"""

import numpy as np

from .formats import store
from .loss import below, step_loss
from .ops import Op, log_softmax


def soft_cross_entropy(log_q, log_p):
    """-sum p log q."""
    return -np.sum(np.exp(log_p) * log_q, axis=-1)


def kl(log_q, log_p):
    """sum p (log p - log q)."""
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(log_q, log_p):
    """sum q (log q - log p)."""
    return np.sum(np.exp(log_q) * (log_q - log_p), axis=-1)


def _log_mixture(log_q, log_p):
    """log (p + q) / 2."""
    top = -np.minimum(-log_q, -log_p)
    return top + np.log(0.5 * (np.exp(log_q - top) + np.exp(log_p - top)))


def jensen_shannon(log_q, log_p):
    """The mean of the KL divergences of p and q from (p + q) / 2."""
    log_m = _log_mixture(log_q, log_p)
    return 0.5 * np.sum(np.exp(log_p) * (log_p - log_m) + np.exp(log_q) * (log_q - log_m), axis=-1)


def total_variation(log_q, log_p):
    """1 - sum min(p, q), which is sum |p - q| / 2."""
    return 1 - np.sum(np.exp(np.minimum(log_p, log_q)), axis=-1)


# -- d / d draft logits; d q_x / d logit_y = q_x ([x = y] - q_y) -------------------------------------------------------


def _through_softmax(log_q, slope):
    """From d / d q to d / d logits."""
    q = np.exp(log_q)
    return q * (slope - np.sum(q * slope, axis=-1, keepdims=True))


def _d_cross_entropy(log_q, log_p):
    return np.exp(log_q) - np.exp(log_p)


def _d_reverse_kl(log_q, log_p):
    return _through_softmax(log_q, log_q - log_p)


def _d_jensen_shannon(log_q, log_p):
    return _through_softmax(log_q, 0.5 * (log_q - _log_mixture(log_q, log_p)))


def _d_total_variation(log_q, log_p):
    """Of sum |p - q| / 2: half the sign of q - p. The sum of the halves cancels; its error stays."""
    return _through_softmax(log_q, 0.5 - below(log_q, log_p))


#: Name: the loss, and its derivative, of log q and log p.
DIVERGENCES = {
    "soft_ce": (soft_cross_entropy, _d_cross_entropy),
    "kl": (kl, _d_cross_entropy),
    "reverse_kl": (reverse_kl, _d_reverse_kl),
    "js": (jensen_shannon, _d_jensen_shannon),
    "tv": (total_variation, _d_total_variation),
}
#: What the losses of the slots become: one each, their mean over the supervised slots, or over all of them.
REDUCTIONS = ("none", "supervised", "all_slots")


def _reduced(losses, mask, reduction: str):
    return losses if reduction == "none" else step_loss(reduction).forward(losses, mask)


def _to_slots(d_y, y, mask, reduction: str):
    """d loss of each slot, with an axis for the vocabulary."""
    d = d_y if reduction == "none" else step_loss(reduction).backward(y, mask, y, d_y)[0]
    return d[..., None]


def divergence(name: str, reduction: str) -> Op:
    """Of draft logits and log p [..., V] and mask [...]; -> [...], or [] where reduced."""
    function, derivative = DIVERGENCES[name]

    def forward(draft_logits, log_p, mask):
        return _reduced(function(log_softmax(draft_logits), log_p), mask, reduction)

    def backward(draft_logits, log_p, mask, y, d_y):
        return _to_slots(d_y, y, mask, reduction) * derivative(log_softmax(draft_logits), log_p), None, None

    return Op(forward, backward)


def hybrid(first: str, decay: float, reduction: str, first_reduction: str) -> Op:
    """w x first + (1 - w) x tv with w = exp(-decay x acceptance), which gets no gradient (arXiv:2602.23881).

    Reduced, the acceptance is the mean over the supervised slots and the sum is of two means; ``first`` may be taken
    over other slots than the acceptance. Inputs as those of ``divergence``.
    """
    one, other = divergence(first, first_reduction), divergence("tv", reduction)

    def weight(distance):
        return np.exp(-decay * (1 - distance))

    def forward(*inputs):
        distance = other.forward(*inputs)
        w = weight(distance)
        return w * one.forward(*inputs) + (1 - w) * distance

    def backward(*inputs):
        *given, _, d_y = inputs
        distance = other.forward(*given)
        w = weight(distance)
        d_first = one.backward(*given, one.forward(*given), w * d_y)[0]
        d_other = other.backward(*given, distance, (1 - w) * d_y)[0]
        return store(d_first, "gradient") + store(d_other, "gradient"), None, None  # each use may be rounded

    return Op(forward, backward)
