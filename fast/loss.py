"""The LK loss -log sum_x min(p_x, q_x) in log space, its gradient, and its sums (spec.md section 5).

With theta_x = [q_x < p_x], alpha = sum_x min(p_x, q_x) and s = sum_x theta_x q_x,
dloss/dQ_x = -(q_x / alpha)(theta_x - s). Where theta_x = 0 that is q_x (s / alpha), and s <= alpha; where it is 1,
(q_x / alpha)(s - 1), and q_x <= alpha. Taken from logarithms in these two groups nothing overflows however small alpha
is, and no clamp is needed.

So a row of logits is summed up in four numbers, its *statistics*: the largest logit and the log of the sum of
exp(x - largest) (its *normaliser*), log alpha, and s / alpha. From them the gradient is one exponential per logit, and
can take the place of the logits. The target's normaliser is the same for all steps that are compared with it.
"""

import torch
from torch import Tensor

from .backend import choose
from .kernels import native
from .ops import wide

BLOCK = 1 << 20  # logits that the eager backend works on at once


def log_probs(logits: Tensor, subset: Tensor | None = None, normaliser: Tensor | None = None) -> Tensor:
    """log softmax of logits [..., V] under the full normaliser, wide; with ``subset`` [v] only those columns.

    Both sides of the loss take this one path, so that equal logits give equal bits. ``normaliser`` [..., 2] where it is
    known already.
    """
    logits = logits.to(wide(logits.dtype))
    normaliser = row_normaliser(logits) if normaliser is None else normaliser
    largest, log_sum = normaliser.split(1, -1)  # [..., 1]
    return ((logits if subset is None else logits[..., subset]) - largest) - log_sum


def row_normaliser(logits: Tensor) -> Tensor:
    """Largest logit and log of the sum of exp(logit - largest), wide. [..., V] -> [..., 2]."""
    logits = logits.to(wide(logits.dtype))
    largest = logits.amax(-1, keepdim=True)
    return torch.cat([largest, (logits - largest).exp_().sum(-1, keepdim=True).log()], -1)


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
    *,
    backend: str | None = None,
) -> Tensor:
    """Loss of every position, [...], wide. draft_logits [..., V or v], target_logits [..., V] (no gradient).

    For the backward pass it keeps its arguments and, but for the eager backend, four numbers a position.
    """
    target_logits = target_logits.detach()
    if choose(backend, draft_logits, target_logits) == "eager":
        log_p = target_log_probs(target_logits, draft_to_target, reduced_target)
        return _LKLoss.apply(draft_logits, log_p)
    target_logits, normaliser = reduce_target(target_logits, draft_to_target, reduced_target, backend)
    return _StreamedLKLoss.apply(draft_logits, target_logits, normaliser, backend)


class _LKLoss(torch.autograd.Function):
    """The loss from whole matrices of log probabilities."""

    @staticmethod
    def forward(ctx, draft_logits, log_p):
        log_q = log_probs(draft_logits)
        log_alpha, share = acceptance(log_p, log_q)
        ctx.save_for_backward(log_p, log_q, log_alpha, share)
        ctx.dtype = draft_logits.dtype
        return -log_alpha

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        return lk_gradient(*ctx.saved_tensors, d_loss).to(ctx.dtype), None


def acceptance(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """log alpha and s / alpha, the sum of q over q < p in units of alpha. Both [..., V] -> two of [...]."""
    low = torch.minimum(log_p, log_q)
    log_alpha = torch.logsumexp(low, dim=-1)
    share = low.sub_(log_alpha.unsqueeze(-1)).exp_().mul_(log_q < log_p).sum(-1)
    return log_alpha, share


def lk_gradient(log_p: Tensor, log_q: Tensor, log_alpha: Tensor, share: Tensor, d_loss: Tensor) -> Tensor:
    """d_loss [...] times the gradient of each position's loss on its draft logits. -> [..., V]."""
    below = log_q < log_p  # theta
    log_alpha, share, d_loss = (x.unsqueeze(-1) for x in (log_alpha, share, d_loss))
    factor = torch.where(below, d_loss * (share * log_alpha.exp() - 1), d_loss * share)
    return torch.where(below, log_q - log_alpha, log_q).exp_().mul_(factor)


class _StreamedLKLoss(torch.autograd.Function):
    """The loss row by row: statistics forward, the gradient from them backward."""

    @staticmethod
    def forward(ctx, draft_logits, target_logits, normaliser, backend):
        statistics = _rows(draft_logits, target_logits, normaliser, backend=backend)
        ctx.save_for_backward(draft_logits, target_logits, normaliser, statistics)
        ctx.backend = choose(backend, draft_logits)
        return -statistics[..., 2]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        draft, target, normaliser, statistics = ctx.saved_tensors
        out = torch.empty_like(draft, memory_format=torch.contiguous_format)
        _rows(draft, target, normaliser, statistics=statistics, weight=d_loss, out=out, backend=ctx.backend)
        return out, None, None, None


def log_normaliser(logits: Tensor, backend: str | None = None) -> Tensor:
    """``row_normaliser`` by the chosen backend, float64 for float64 and else float32. [..., V] -> [..., 2]."""
    kernels = _kernels(choose(backend, logits))
    return kernels.lk_normaliser(_matrix(logits)).reshape(*logits.shape[:-1], 2)


def reduce_target(
    target_logits: Tensor, draft_to_target: Tensor | None, reduced_target: str, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The target's logits over the draft vocabulary [..., v], their normaliser [..., 2]; see ``target_log_probs``."""
    if draft_to_target is None:
        return target_logits, log_normaliser(target_logits, backend)
    reduced = target_logits[..., draft_to_target]
    return reduced, log_normaliser(reduced if reduced_target == "renormalized" else target_logits, backend)


def lk_loss_with_gradient(
    draft_logits: Tensor,
    target_logits: Tensor,
    weight: Tensor,
    *,
    target_normaliser: Tensor | None = None,
    target_rows: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of every position, [...], wide, and the gradient of sum(weight x loss) on the draft's logits, [..., V].

    draft_logits [..., V], weight [...], target_logits [..., V] or, with ``target_rows`` int64 [...], [U, V]: the row
    that each position is compared with. ``target_normaliser`` [..., 2] or [U, 2]: the target's ``log_normaliser``, to
    be computed once for all steps. The gradient is written to ``out``, which may be ``draft_logits`` itself; else to a
    new tensor of its type. A position of weight zero gets a zero gradient, whatever its logits.

    Extra memory: six numbers a position (eager: 32 MB). Nothing is kept for a backward pass. Raises ValueError for an
    ``out`` whose shape is another or whose positions are not rows in memory.
    """
    normaliser = log_normaliser(target_logits, backend) if target_normaliser is None else target_normaliser
    out = torch.empty_like(draft_logits, memory_format=torch.contiguous_format) if out is None else out
    if out.shape != draft_logits.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; wanted that of the draft's logits")
    statistics = _rows(
        draft_logits, target_logits, normaliser, target_rows=target_rows, weight=weight, out=out, backend=backend
    )
    return -statistics[..., 2], out


@torch.no_grad()
def _rows(draft, target, normaliser, *, target_rows=None, statistics=None, weight=None, out=None, backend=None):
    """Statistics [..., 4] of the draft's rows, computed unless given, and the gradient in ``out``."""
    shape = draft.shape[:-1]
    given = [x for x in (draft, target, out) if x is not None]
    kernels, precise = _kernels(choose(backend, *given)), wide(draft.dtype)
    if statistics is None:
        computed = torch.empty((shape.numel(), 4), dtype=precise, device=draft.device)
    else:
        computed = statistics.reshape(-1, 4).contiguous()
    kernels.lk_rows(
        _matrix(draft),
        _matrix(target),
        None if target_rows is None else target_rows.flatten().contiguous(),
        normaliser.reshape(-1, 2).contiguous(),
        computed,
        statistics is not None,
        None if weight is None else weight.to(precise).expand(shape).flatten().contiguous(),
        None if out is None else _rows_in_place(out),
    )
    return computed.reshape(*shape, 4)


def _matrix(x: Tensor) -> Tensor:
    """x [..., V] as rows that are contiguous each. -> [R, V]."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _rows_in_place(out: Tensor) -> Tensor:
    """The same, of a tensor that is written to: never a copy."""
    try:
        matrix = out.view(-1, out.shape[-1])
    except RuntimeError as error:
        raise ValueError("out's positions are not rows in memory") from error
    if matrix.stride(1) != 1:
        raise ValueError("out's positions are not rows in memory")
    return matrix


def _kernels(backend: str):
    """The module or class whose ``lk_normaliser`` and ``lk_rows`` are this backend's."""
    if backend == "triton":
        from .kernels import triton_lk

        return triton_lk
    return native if backend == "native" else _Eager


class _Eager:
    """The kernels in plain PyTorch, a block of rows at a time; the arguments are those of ``kernels.native``."""

    @staticmethod
    def lk_normaliser(x: Tensor) -> Tensor:
        return torch.cat([row_normaliser(part) for part in x.split(_block_rows(x))])

    @staticmethod
    def lk_rows(draft, target, target_rows, normaliser, statistics, given, weight, out) -> None:
        for start in range(0, len(draft), _block_rows(draft)):
            rows = slice(start, start + _block_rows(draft))
            of_target = rows if target_rows is None else target_rows[rows]
            log_p = log_probs(target[of_target], normaliser=normaliser[of_target])
            if not given:
                statistics[rows, :2] = row_normaliser(draft[rows])
            log_q = log_probs(draft[rows], normaliser=statistics[rows, :2])
            if not given:
                statistics[rows, 2], statistics[rows, 3] = acceptance(log_p, log_q)
            if out is not None:
                gradient = lk_gradient(log_p, log_q, statistics[rows, 2], statistics[rows, 3], weight[rows])
                out[rows] = gradient.masked_fill_(weight[rows].unsqueeze(-1) == 0, 0)


def _block_rows(x: Tensor) -> int:
    return max(1, BLOCK // x.shape[1])


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
