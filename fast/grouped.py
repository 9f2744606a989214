"""Products of rows that are sorted by expert, as operators that torch.compile takes whole.

Their shapes do not depend on how many rows an expert has.
"""

import torch
from torch import Tensor


@torch.library.custom_op("draftconf::grouped_linear", mutates_args=())
def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each row times the transposed weight of its expert. [P, in], [E, out, in], counts [E] -> [P, out]."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight.mT for part, weight in zip(parts, weights.unbind(0), strict=True)])


@torch.library.custom_op("draftconf::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """For each expert the transposed product of its rows. [P, out], [P, in], counts [E] -> [E, out, in]."""
    parts = zip(*(x.split(counts.tolist()) for x in (left, right)), strict=True)
    return torch.stack([a.mT @ b for a, b in parts])


@grouped_linear.register_fake
def _(rows, weights, counts):
    return rows.new_empty(rows.shape[0], weights.shape[1])


@grouped_outer.register_fake
def _(left, right, counts):
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_y):
    rows, weights, counts = ctx.saved_tensors
    return grouped_linear(d_y, weights.mT, counts), grouped_outer(d_y, rows, counts), None


grouped_linear.register_autograd(_backward, setup_context=_keep)
