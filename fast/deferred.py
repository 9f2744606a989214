"""Weight gradients of all unrolled steps at once: one product per weight, when its last use has been differentiated.

A weight that K steps use would otherwise get K gradients of its own size, each written to fresh memory, rounded and
added. Here every use notes its input and its cotangent, and autograd itself tells when the last one has: the uses
depend on a ``token`` made from the weight, so the token's backward runs after all of theirs.
"""

import torch
from torch import Tensor

from .ops import wide


class Uses:
    """What the uses of one weight left behind, by the order of the forward: index -> tensors.

    With ``deferred`` False nothing is kept: each use adds its own product to a gradient in the wide type, which costs
    K products and keeps memory flat in K.
    """

    def __init__(self, deferred: bool = True):
        self.deferred, self.count, self.kept = deferred, 0, {}

    def next_index(self) -> int:
        self.count += 1
        return self.count

    def take(self) -> list:
        """What was kept, in the order of the forward, and forget it."""
        kept = [self.kept[index] for index in sorted(self.kept)]
        self.kept = {}
        return kept


class Weight:
    """A weight [out, in] that several steps use, and what its gradient needs. Made anew for every unroll."""

    def __init__(self, weight: Tensor, deferred: bool = True):
        self.value, self.uses = weight.detach(), Uses(deferred)
        self.token = _WeightGradient.apply(weight, self.uses)

    def linear(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x W^T, accumulated wide, in ``dtype`` or that of x. x [..., in] -> [..., out]."""
        return _Linear.apply(x, self.value, self.token, self.uses, dtype or x.dtype)


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b accumulated wide and rounded once to ``dtype``. Operands of one storage type are multiplied in it."""
    if dtype == a.dtype == b.dtype:
        return a @ b
    compute = wide(dtype)
    return (a.to(compute) @ b.to(compute)).to(dtype)


class _Linear(torch.autograd.Function):
    """y = x W^T. Backward: d_x = d_y W; d_W is left to the weight's token."""

    @staticmethod
    def forward(ctx, x, weight, token, uses, dtype):
        ctx.save_for_backward(x, weight)
        ctx.uses, ctx.index = uses, uses.next_index()
        return multiply(x.flatten(0, -2), weight.t(), dtype).unflatten(0, x.shape[:-1])  # [..., out]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        rows = d_y.flatten(0, -2)  # [N, out]
        if ctx.needs_input_grad[2]:
            note(ctx.uses, ctx.index, x.flatten(0, -2), rows)
        d_x = multiply(rows, weight, x.dtype).unflatten(0, x.shape[:-1]) if ctx.needs_input_grad[0] else None
        return d_x, None, d_y.new_zeros(()), None, None


def note(uses: Uses, index: int, x: Tensor, d_y: Tensor) -> None:
    """Keep the two factors of one use's weight gradient, or add their product to the running sum."""
    if uses.deferred:
        uses.kept[index] = x, d_y
        return
    d_weight = multiply(d_y.t(), x, x.dtype).to(wide(x.dtype))
    uses.kept[0] = d_weight if 0 not in uses.kept else uses.kept[0].add_(d_weight)


class _WeightGradient(torch.autograd.Function):
    """weight -> token []. Backward: d_W = d_Y^T X over the rows of all uses."""

    @staticmethod
    def forward(ctx, weight, uses):
        ctx.uses, ctx.dtype = uses, weight.dtype
        ctx.save_for_backward(weight)
        return weight.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_token):
        if not ctx.uses.deferred:
            (total,) = ctx.uses.take() or [torch.zeros_like(ctx.saved_tensors[0])]
            return total.to(ctx.dtype), None
        kept = ctx.uses.take()
        if not kept:
            return torch.zeros_like(ctx.saved_tensors[0]), None
        x, d_y = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*kept, strict=True))
        return multiply(d_y.t(), x, ctx.dtype), None
