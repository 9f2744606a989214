"""The LK loss, minus the log of the acceptance probability, and its gradient set (report eq. 16; spec.md section 5).

p = softmax(target logits), q = softmax(draft logits), alpha = sum min(p, q), loss = -log alpha. All in log space: the
loss is finite whenever the differences of the logits are.
"""

import numpy as np

from .ops import Op, log_softmax, no_gradient


def target_log_probs(target_logits, draft_to_target=None, reduced_target: str = "restricted"):
    """log p over the draft's vocabulary. [..., V] -> [..., V or draft vocabulary].

    ``restricted`` keeps the full normaliser, ``renormalized`` does not (spec.md section 9).
    """
    if draft_to_target is None:
        return log_softmax(target_logits)
    if reduced_target == "renormalized":
        return log_softmax(target_logits[..., draft_to_target])
    return log_softmax(target_logits)[..., draft_to_target]


def target_op(reduced_target: str) -> Op:
    """The target is frozen: no gradient (spec.md section 5)."""
    return Op(lambda logits, ids: target_log_probs(logits, ids, reduced_target), no_gradient)


def _log_acceptance(log_p, log_q):
    low = np.minimum(log_p, log_q)
    top = np.max(low, axis=-1, keepdims=True)
    return top[..., 0] + np.log(np.sum(np.exp(low - top), axis=-1))


def lk_loss(draft_logits, log_p):
    """-logsumexp of min(log p, log q). Two [..., V] -> [...]."""
    return -_log_acceptance(log_p, log_softmax(draft_logits))


def below(log_q, log_p):
    """theta: 1.0 where q < p, else 0.0. At q = p any value in [0, 1] is right; the oracle takes 0."""
    if hasattr(log_q, "below"):
        return log_q.below(log_p)
    return (np.real(log_q) < np.real(log_p)).astype(float)


def lk_loss_backward(draft_logits, log_p, loss, d_loss, theta=None):
    """With theta = [q < p] and e = theta q / alpha: d alpha/dQ_x = q_x (theta_x - sum theta q), so

    dloss/dQ_x = -(q_x / alpha)(theta_x - sum theta q) = q_x sum(e) - e_x.  Where theta is 1, q_x <= alpha: no overflow.
    Another ``theta`` of the gradient set may be given.
    """
    log_q = log_softmax(draft_logits)
    log_alpha = -loss[..., None]
    theta = below(log_q, log_p) if theta is None else theta
    e = theta * np.exp(np.minimum(log_q - log_alpha, 0.0))
    return d_loss[..., None] * (np.exp(log_q) * np.sum(e, axis=-1, keepdims=True) - e)


LK_LOSS = Op(lk_loss, lambda draft, log_p, y, d_y: (lk_loss_backward(draft, log_p, y, d_y), None))


def gradient_violation(draft_logits, target_logits, gradient, tolerance, margin=0.0) -> float:
    """How far ``gradient`` [V] lies outside Clarke's subdifferential at one slot, in units of ``tolerance`` [V] or
    scalar.

    g is a member iff sum g = 0 and some s makes theta = s - g alpha / q equal 1 where q < p, 0 where q > p and lie in
    [0, 1] where q = p (spec.md section 5). At most 1 means: a member, to within the tolerance on g. Log probabilities
    within ``margin`` [V] or scalar count as equal.
    """
    log_q, log_p = log_softmax(np.asarray(draft_logits, float)), log_softmax(np.asarray(target_logits, float))
    g = np.asarray(gradient, float)
    tol = np.maximum(np.broadcast_to(np.asarray(tolerance, float), g.shape), np.finfo(float).tiny)
    q, e = np.exp(log_q), np.exp(np.minimum(log_q - _log_acceptance(log_p, log_q), 0.0))  # e = q / alpha where q <= p
    least, most = np.where(log_q < log_p - margin, e, 0.0), np.where(log_q <= log_p + margin, e, 0.0)

    def excess(share):  # g = q share - theta e with theta in its interval; share = s / alpha; convex in share
        return np.max(np.maximum(q * share - most - g, g - q * share + least) / tol)

    return float(max(_least(excess, 0.0, 1.0), abs(g.sum()) / tol.sum()))


def _least(convex, left: float, right: float) -> float:
    """The least value of a convex function on an interval, by golden-section search."""
    shrink = (5**0.5 - 1) / 2
    for _ in range(200):
        a, b = right - shrink * (right - left), left + shrink * (right - left)
        left, right = (left, b) if convex(a) <= convex(b) else (a, right)
    return convex((left + right) / 2)


def step_loss(reduction: str) -> Op:
    """The mean of the slot losses over the supervised slots; exactly 0 without any. Two [B, T] -> []."""

    def count(supervised):
        return max(supervised.size if reduction == "all_slots" else int(supervised.sum()), 1)

    return Op(
        lambda losses, supervised: np.sum(np.where(supervised, losses, 0.0)) / count(supervised),
        lambda losses, supervised, y, d_y: (d_y * (supervised / count(supervised)), None),
    )


def total_loss(weights: list[float]) -> Op:
    """The weighted sum of the step losses. K scalars -> []."""

    def forward(*step_losses):
        return sum(w * loss for w, loss in zip(weights, step_losses, strict=True))

    return Op(forward, lambda *a: tuple(w * a[-1] for w in weights))
