"""The head and the LK loss of all unrolled steps at once, without a matrix of logits (spec.md sections 4 and 5).

With tokens given, logits feed nothing back into the unroll. So the head can wait until all steps are done: their hidden
states are stacked, and for a few positions at a time the logits are made, turned in place into the gradient that
``fast.loss`` gives in closed form, and multiplied by the head again: dL/dh = (dL/dlogits) W. Two products a step are
all that is left of the head's time, and one chunk of logits of its memory. Rows are taken in the order of the target
position that they are compared with, so the target's head runs once a position, and only for positions that some
supervised slot needs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .loss import lk_loss_with_gradient, reduce_target
from .ops import wide

LOGITS = ("float32", "bfloat16")
CHUNK_ROWS = 256  # rows of logits at a time, the draft's and the computed target's together; fewer slow the products
WIDENED = 1 << 22  # values of a weight that are widened at a time


@torch.no_grad()
def linear_lk_loss(
    hidden: Tensor,
    target: Tensor,
    head: Tensor,
    weights: Tensor,
    *,
    target_head: Tensor | None = None,
    target_shift: bool = True,
    draft_to_target: Tensor | None = None,
    reduced_target: str = "restricted",
    logits: str = "float32",
    d_head: Tensor | None = None,
    chunk_rows: int = CHUNK_ROWS,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses of all slots, wide [K, T], and the gradient of sum(weights x losses) on the hidden states [K, T, d].

    hidden [K, T, d] of K steps, normed, T over all sequences; head [v, d], frozen unless ``d_head`` [v, d], wide, is
    given: the head's gradient is added to it. target: logits [T, V] of step 1, or with ``target_head`` [V, d'] the
    target's last hidden states [T, d']. Step k (from 1) is compared with the target k-1 slots further on, or with
    ``target_shift`` False with its own slot's. weights [K, T]: what a slot's loss counts in the total, 0 where it is
    not supervised; there the loss and the gradient are 0 and nothing is computed, whatever the inputs hold.
    draft_to_target, reduced_target: see ``fast.loss.lk_loss``.

    ``logits``: the type of the chunk. "float32" (float64 of float64) multiplies wide, on CUDA two bfloat16 factors into
    float32; "bfloat16" rounds the logits, which moves the gradient by tens of per cent where q is near p: q < p flips.

    Memory beyond the results: ``chunk_rows`` rows of V logits in that type and the same of d hidden states, whatever T
    and K are; 90 MB in bfloat16 at V = 163840. On the CPU a product of bfloat16 in float32 adds 16 MB. Raises
    ValueError for shapes that do not fit, an unknown type of logits, and a weight where the target ends.
    """
    _check(hidden, target, head, weights, target_head, logits)
    parts = list(chunks(weights, target_shift, chunk_rows, target_head is not None))
    most = {
        "draft": max((len(part.step) for part in parts), default=0),
        "target": max((len(part.positions) for part in parts), default=0),
    }
    chunk = _Chunk(hidden, target, head, target_head, draft_to_target, reduced_target, logits, most, backend)
    losses = torch.zeros(weights.shape, dtype=wide(hidden.dtype), device=hidden.device)
    d_hidden = torch.zeros_like(hidden)
    for rows in parts:
        h = hidden[rows.step, rows.slot]  # [R, d]
        loss, d_logits = chunk.loss_and_gradient(h, rows, weights[rows.step, rows.slot])
        losses[rows.step, rows.slot] = loss
        d_hidden[rows.step, rows.slot] = chunk.times_head(d_logits).to(hidden.dtype)
        if d_head is not None:
            add_outer(d_head, d_logits, h)
    return losses, d_hidden


def _check(hidden, target, head, weights, target_head, logits) -> None:
    steps, slots, _ = hidden.shape
    wanted = {"weights": (weights, (steps, slots)), "head": (head, (head.shape[0], hidden.shape[2]))}
    if target_head is None:
        wanted["target"] = target, (slots, target.shape[-1])
    else:
        wanted["target"] = target, (slots, target_head.shape[1])
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted {shape}")
    if logits not in LOGITS:
        raise ValueError(f"logits is {logits!r}; wanted one of {', '.join(LOGITS)}")
    if logits == "bfloat16" and not hidden.dtype == head.dtype == torch.bfloat16:
        raise ValueError(f"logits is 'bfloat16', hidden {hidden.dtype} and head {head.dtype}; wanted both bfloat16")


class Rows(NamedTuple):
    """A chunk of supervised slots: ``step`` (from 0) and ``slot`` int64 [R], ``target`` int64 [R], indices into
    ``positions`` [c], the target's slots that they are compared with."""

    step: Tensor
    slot: Tensor
    target: Tensor
    positions: Tensor


def chunks(weights: Tensor, target_shift: bool, chunk_rows: int, counts_target: bool) -> Iterator[Rows]:
    """The slots of nonzero weight, by target position, all of one position in one chunk.

    A chunk has at most ``chunk_rows`` rows (with ``counts_target`` its positions count too), unless one position alone
    has more. Raises ValueError where a slot's target lies past the end.
    """
    slots = weights.shape[1]
    slot, step = weights.t().nonzero(as_tuple=True)
    position = slot + step if target_shift else slot
    if len(position) and position.max() >= slots:
        i = position.argmax()
        raise ValueError(f"weights[{step[i]}, {slot[i]}] is not zero; wanted zero where the target is past the end")
    order = position.argsort(stable=True)
    step, slot, position = step[order], slot[order], position[order]
    used, index, count = position.unique_consecutive(return_inverse=True, return_counts=True)
    for first, last, start, end in _cut(count.tolist(), chunk_rows, counts_target):
        yield Rows(step[start:end], slot[start:end], index[start:end] - first, used[first:last])


def _cut(counts: list[int], chunk_rows: int, counts_target: bool) -> Iterator[tuple[int, int, int, int]]:
    """First and last position, first and last row of each chunk, the last exclusive."""
    first = start = end = 0
    for i, count in enumerate(counts):
        positions = i + 1 - first if counts_target else 0
        if i > first and end + count - start + positions > chunk_rows:
            yield first, i, start, end
            first, start = i, end
        end += count
    if counts:
        yield first, len(counts), start, end


class _Chunk:
    """The buffers of one chunk, and what is done in them."""

    def __init__(self, hidden, target, head, target_head, draft_to_target, reduced_target, logits, most, backend):
        self.most = most  # rows of a chunk, the draft's and the target's
        self.target, self.head, self.target_head, self.backend = target.detach(), head.detach(), target_head, backend
        self.reduced = draft_to_target, reduced_target
        self.dtype = torch.bfloat16 if logits == "bfloat16" else wide(hidden.dtype)
        # Of a bfloat16 head on CUDA the second product takes the gradient in bfloat16 as well.
        self.d_dtype = head.dtype if head.is_cuda else self.dtype
        self.buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns], reused from chunk to chunk."""
        if name not in self.buffers:
            most = self.most["target" if name == "target" else "draft"]
            self.buffers[name] = torch.empty(most, columns, dtype=dtype, device=self.head.device)
        return self.buffers[name][:rows]

    def logits_of(self, name: str, h: Tensor, weight: Tensor) -> Tensor:
        return times_transposed(h, weight, self.buffer(name, len(h), len(weight), self.dtype))

    def targets(self, positions: Tensor) -> Tensor:
        """The target's logits [c, V] at these positions, which are in ascending order."""
        rows = self.target[positions[0] : positions[-1] + 1]
        if len(rows) != len(positions):
            rows = self.target[positions]
        return rows if self.target_head is None else self.logits_of("target", rows, self.target_head)

    def loss_and_gradient(self, h: Tensor, rows: Rows, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [R] and their gradient on the logits [R, v], which takes the place of the logits."""
        target, normaliser = reduce_target(self.targets(rows.positions), *self.reduced, self.backend)
        z = self.logits_of("draft", h, self.head)
        out = z if self.d_dtype == self.dtype else self.buffer("gradient", *z.shape, self.d_dtype)
        return lk_loss_with_gradient(
            z, target, weight, target_normaliser=normaliser, target_rows=rows.target, out=out, backend=self.backend
        )

    def times_head(self, d_logits: Tensor) -> Tensor:
        return times(d_logits, self.head, self.buffer("hidden", len(d_logits), self.head.shape[1], self.d_dtype))


def times_transposed(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x W^T in the type of ``out`` [R, v], accumulated wide. x [R, d], weight [v, d]."""
    if x.dtype == weight.dtype == out.dtype:
        return torch.mm(x, weight.t(), out=out)
    if x.is_cuda and x.dtype == weight.dtype:
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    x = x.to(out.dtype)
    for part in _parts(weight):
        torch.mm(x, weight[part].to(out.dtype).t(), out=out[:, part])
    return out


def times(y: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """y W in the type of ``out`` [R, d], accumulated wide. y [R, v], weight [v, d]."""
    if y.dtype == weight.dtype == out.dtype:
        return torch.mm(y, weight, out=out)
    out.zero_()
    for part in _parts(weight):
        out.addmm_(y[:, part].to(out.dtype), weight[part].to(out.dtype))
    return out


def add_outer(d_weight: Tensor, y: Tensor, x: Tensor) -> None:
    """d_weight [v, d] += y^T x, accumulated wide. y [R, v], x [R, d]."""
    x = x.to(d_weight.dtype)
    for part in _parts(d_weight):
        d_weight[part].addmm_(y[:, part].to(d_weight.dtype).t(), x)


def _parts(weight: Tensor) -> Iterator[slice]:
    """Slices of a weight's rows of at most ``WIDENED`` values."""
    rows = max(1, WIDENED // weight.shape[1])
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def linear_lk_total(hidden: Tensor, target: Tensor, head: Tensor, weights: Tensor, **settings) -> tuple[Tensor, Tensor]:
    """sum(weights x losses) [], with its gradient on ``hidden`` and on a ``head`` that requires one, and the losses.

    The arguments of ``linear_lk_loss``. The gradient is made here and kept for the backward pass, which only scales
    it. The losses [K, T] carry none.
    """
    return _LinearLK.apply(hidden, head, target.detach(), weights.detach(), settings)


class _LinearLK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, target, weights, settings):
        trained = ctx.needs_input_grad[1]
        d_head = torch.zeros_like(head, dtype=wide(head.dtype)) if trained else None
        losses, d_hidden = linear_lk_loss(hidden, target, head, weights, d_head=d_head, **settings)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.dtype = head.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_total, _):
        d_hidden, d_head = ctx.saved_tensors
        d_head = None if d_head is None else (d_head * d_total).to(ctx.dtype)
        return d_hidden * d_total, d_head, None, None, None
