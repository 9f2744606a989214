"""The LK loss -log sum_x min(p_x, q_x) in log space, its gradient, and its sums (spec.md section 5)."""

import torch
from torch import Tensor

from fast.ops import wide


def log_probs(logits: Tensor, subset: Tensor | None = None) -> Tensor:
    """log softmax of logits [..., V] under the full normaliser, wide; with ``subset`` [v] only those columns.

    Both sides of the loss take this one path, so that equal logits give equal bits.
    """
    logits = logits.to(wide(logits.dtype))
    shifted = logits - logits.amax(-1, keepdim=True)
    normaliser = shifted.exp().sum(-1, keepdim=True).log()
    return (shifted if subset is None else shifted[..., subset]) - normaliser


def target_log_probs(target_logits: Tensor, draft_to_target: Tensor | None, reduced_target: str) -> Tensor:
    """log p over the draft vocabulary: "restricted" keeps p's full normaliser, "renormalized" does not."""
    if draft_to_target is None:
        return log_probs(target_logits)
    if reduced_target == "renormalized":
        return log_probs(target_logits[..., draft_to_target])
    return log_probs(target_logits, draft_to_target)


def lk_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    draft_to_target: Tensor | None = None,
    reduced_target: str = "restricted",
) -> Tensor:
    """Loss of every position, [...], wide. draft_logits [..., V or v], target_logits [..., V] (no gradient)."""
    return _LKLoss.apply(draft_logits, target_log_probs(target_logits.detach(), draft_to_target, reduced_target))


class _LKLoss(torch.autograd.Function):
    """dloss/dQ_x = -(q_x / alpha) (theta_x - s), theta_x = [q_x < p_x], s = sum_x theta_x q_x.

    With theta_x = 0 the factor is q_x (s / alpha), and s <= alpha; with theta_x = 1 it is (q_x / alpha) (1 - s), and
    q_x <= alpha. Taken from logarithms in these two groups nothing overflows however small alpha is.
    """

    @staticmethod
    def forward(ctx, draft_logits, log_p):
        log_q = log_probs(draft_logits)
        log_alpha = torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)
        ctx.save_for_backward(log_p, log_q, log_alpha)
        ctx.dtype = draft_logits.dtype
        return -log_alpha

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        log_p, log_q, log_alpha = (x if x.ndim > d_loss.ndim else x.unsqueeze(-1) for x in ctx.saved_tensors)
        below = log_q < log_p  # theta
        log_s = torch.logsumexp(log_q.masked_fill(~below, -torch.inf), dim=-1, keepdim=True)
        log_rest = torch.logsumexp(log_q.masked_fill(below, -torch.inf), dim=-1, keepdim=True)  # log(1 - s)
        factor = torch.where(below, -log_rest.exp(), (log_s - log_alpha).exp())
        d_logits = factor * (log_q - torch.where(below, log_alpha, 0)).exp()
        return (d_loss.unsqueeze(-1) * d_logits).to(ctx.dtype), None


def below(
    draft_logits: Tensor,
    target_logits: Tensor,
    draft_to_target: Tensor | None = None,
    reduced_target: str = "restricted",
) -> Tensor:
    """The decision theta: where q < p, strictly, as the gradient takes it. bool [..., V or v]."""
    return log_probs(draft_logits) < target_log_probs(target_logits, draft_to_target, reduced_target)


def total_loss(
    slot_losses: Tensor,
    supervised: Tensor,
    step_weights: list[float],
    reduction: str = "supervised",
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted total [] and the step losses [K] of slot losses and supervised slots, both [K, B, T].

    A step loss is the sum over its supervised slots divided by their number, or by B T with "all_slots"; ``counts``
    [K] replaces that number when the batch is one part of a larger one. No supervised slot gives exactly 0.
    """
    sums = torch.where(supervised, slot_losses, 0).sum((1, 2))  # [K]
    if counts is None:
        counts = supervised.sum((1, 2)) if reduction == "supervised" else supervised[0].numel()
    counts = torch.as_tensor(counts, device=sums.device).clamp(min=1)
    step_losses = sums / counts
    return (step_losses * step_losses.new_tensor(step_weights)).sum(), step_losses
