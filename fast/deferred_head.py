"""Head and loss of all unrolled steps at once, after the unroll, in chunks of rows.

With tokens given, logits feed nothing back into the unroll, so its hidden states are kept and the head is applied at
the end: the logits of one chunk at a time, the gradient written over them, and straight on to the hidden states (and to
the head's own weight where it is trained). Memory is that of a chunk, whatever T and K are. Only supervised rows are
computed. The gradient is made in the forward pass, where the weight of each slot in the total is known.
"""

import torch
from torch import Tensor

from fast.deferred import multiply
from fast.loss import log_probs, target_log_probs
from fast.ops import wide
from fast.pointwise import row_blocks

CHUNK_ELEMENTS = 1 << 25  # of the logits of a chunk
CHUNK_ROWS = 224  # at least: fewer rows than this lose time in the products


def head_loss(normed: list[Tensor], weight: Tensor, target_logits: Tensor, shares: Tensor, **settings):
    """sum of shares x loss over all slots, and the losses.

    normed: K of [B, T, d]; weight [V or v, d]; target_logits [B, T, V] of step 1; shares [K, B, T] wide: what a slot's
    loss counts in the total, 0 where it is not supervised. settings: ``logits_dtype``; ``target_shift``, whether step k
    reads the target k-1 slots further on; ``draft_to_target`` and ``reduced_target`` of ``fast.loss``.
    Returns total [] and slot losses [K, B, T], which carry no gradient and are 0 where not supervised.
    """
    return _HeadLoss.apply(weight, target_logits.detach(), shares, settings, *normed)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, target_logits, shares, settings, *normed):
        needs = any(ctx.needs_input_grad[4:])
        hidden = torch.stack(normed).flatten(1, 2)  # [K, B T, d]
        losses = shares.new_zeros(hidden.shape[:2])
        d_hidden = torch.zeros_like(hidden) if needs else None
        d_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if ctx.needs_input_grad[0] else None
        position, step = (shares.flatten(1).t() != 0).nonzero(as_tuple=True)  # sorted by position
        rows = max(CHUNK_ROWS, CHUNK_ELEMENTS // len(weight))
        for p, k in zip(position.split(rows), step.split(rows), strict=True):
            h = hidden[k, p]
            logits = multiply(h, weight.t(), settings["logits_dtype"])
            target = target_logits.flatten(0, 1), p + k if settings["target_shift"] else p
            losses[k, p] = lk_rows_(logits, *target, shares.flatten(1)[k, p], settings)
            if needs:
                d_hidden[k, p] = multiply(logits, weight, h.dtype)
            if d_weight is not None:
                d_weight += multiply(logits.t(), h, h.dtype)
        ctx.d_weight, ctx.dtype = d_weight, weight.dtype
        ctx.d_normed = d_hidden.unflatten(1, shares.shape[1:]) if needs else ()
        losses = losses.view(shares.shape)
        ctx.mark_non_differentiable(losses)
        return (losses * shares).sum(), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_total, _):
        d_normed = [d * d_total for d in ctx.d_normed]
        d_weight = None if ctx.d_weight is None else (ctx.d_weight * d_total).to(ctx.dtype)
        return d_weight, None, None, None, *d_normed


def lk_rows_(logits: Tensor, target_logits: Tensor, target: Tensor, shares: Tensor, settings: dict) -> Tensor:
    """Losses [R] of draft logits [R, v], which become share x d_logits. target_logits [N, V], ``target`` int [R]."""
    losses = shares.new_empty(len(logits))
    for block in row_blocks(*logits.shape):
        log_q = log_probs(logits[block])
        log_p = target_log_probs(
            target_logits[target[block]], settings.get("draft_to_target"), settings["reduced_target"]
        )
        losses[block] = lk_gradient_(logits[block], log_q, log_p, shares[block])
    return losses


def lk_gradient_(out: Tensor, log_q: Tensor, log_p: Tensor, shares: Tensor) -> Tensor:
    """The losses [r], and the gradient of share x loss into ``out`` [r, v]; see ``fast.loss`` for its form."""
    log_alpha = torch.logsumexp(torch.minimum(log_p, log_q), dim=-1, keepdim=True)
    below = log_q < log_p
    log_s = torch.logsumexp(log_q.masked_fill(~below, -torch.inf), dim=-1, keepdim=True)
    log_rest = torch.logsumexp(log_q.masked_fill(below, -torch.inf), dim=-1, keepdim=True)
    factor = torch.where(below, -log_rest.exp(), (log_s - log_alpha).exp()) * shares.unsqueeze(-1)
    out.copy_(factor * (log_q - torch.where(below, log_alpha, 0)).exp_())
    return -log_alpha.squeeze(-1)


def head_argmax(normed: Tensor, weight: Tensor, logits_dtype: torch.dtype) -> Tensor:
    """The index of the largest logit, the lowest among equals, in chunks. normed [B, T, d] -> int64 [B, T]."""
    rows = max(CHUNK_ROWS, CHUNK_ELEMENTS // len(weight))
    ids = torch.arange(len(weight), device=weight.device)
    found = []
    for h in normed.detach().flatten(0, 1).split(rows):
        logits = multiply(h, weight.detach().t(), logits_dtype)
        largest = logits == logits.amax(-1, keepdim=True)
        found.append(torch.where(largest, ids, len(weight)).amin(-1))
    return torch.cat(found).view(normed.shape[:2])
