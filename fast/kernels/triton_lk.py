"""The LK loss in Triton: what lk.cpp does, one program a row, the row read in blocks (see ``fast.loss``).

Logarithms are to base 2 inside, natural in what is passed around. Both sides of the loss take the same path.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E_HIGH, LOG2_E_LOW = tl.constexpr(1.4426950216293335), tl.constexpr(1.9259629911783823e-08)
LN_2 = tl.constexpr(0.6931471805599453)
BLOCK = 4096


def lk_normaliser(x: Tensor) -> Tensor:
    """Largest logit and log of the sum of exp(x - largest) of each row. x [R, V] -> float32 [R, 2]."""
    normaliser = torch.empty((len(x), 2), device=x.device)
    _normaliser_kernel[(len(x),)](x, x.stride(0), x.shape[1], normaliser, 2, _block(x), num_warps=8)
    return normaliser


def lk_rows(
    draft: Tensor,
    target: Tensor,
    target_rows: Tensor | None,
    normaliser: Tensor,
    statistics: Tensor,
    given: bool,
    weight: Tensor | None,
    out: Tensor | None,
) -> None:
    """Writes ``statistics`` float32 [R, 4] (or reads them where ``given``), and the gradient to ``out`` [R, V]; see
    ``fast.kernels.native.lk_rows``."""
    block, grid = _block(draft), (len(draft),)
    if target_rows is None:
        target_rows = torch.arange(len(draft), device=draft.device)
    rows = (draft, draft.stride(0), target, target.stride(0), target_rows, normaliser, statistics, draft.shape[1])
    if given:
        _gradient_kernel[grid](*rows, weight, out, out.stride(0), block, num_warps=8)
    elif out is None:
        _statistics_kernel[grid](*rows, block, num_warps=8)
    else:
        _fused_kernel[grid](*rows, weight, out, out.stride(0), block, num_warps=8)


def _block(x: Tensor) -> int:
    return min(BLOCK, triton.next_power_of_2(x.shape[1]))


@triton.jit
def _load(pointer, offsets, size):
    return tl.load(pointer + offsets, mask=offsets < size, other=-float("inf")).to(tl.float32)


@triton.jit
def _log2_probs(x, largest, log2_sum):
    shifted = x - largest
    return shifted * LOG2_E_HIGH + (shifted * LOG2_E_LOW - log2_sum)


@triton.jit
def _normaliser_kernel(x, stride, size, normaliser, width: tl.constexpr, BLOCK: tl.constexpr):
    """Per lane a running largest and a sum relative to it; the lanes are put together at the end."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * stride
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        # A NaN stays: what it is compared with last is kept only where it is no larger.
        largest = tl.maximum(largest, _load(x, start + lanes, size), propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(largest, 0)
    top = tl.where(tl.sum((largest != largest).to(tl.int32), 0) > 0, float("nan"), top)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        total += tl.exp2(_log2_probs(_load(x, start + lanes, size), top, 0.0))
    tl.store(normaliser + row * width, top)
    tl.store(normaliser + row * width + 1, tl.log2(tl.sum(total, 0)) * LN_2)


@triton.jit
def _of_row(normaliser):
    """Largest logit and log2 of the sum."""
    log_sum = tl.load(normaliser + 1)
    return tl.load(normaliser), log_sum * LOG2_E_HIGH + log_sum * LOG2_E_LOW


@triton.jit
def _statistics_kernel(
    draft, draft_stride, target, target_stride, target_rows, normaliser, statistics, size, BLOCK: tl.constexpr
):
    """The draft's normaliser, log a, and (sum of q where q < p) / a, summed relative to the largest min(p, q)."""
    _normaliser_kernel(draft, draft_stride, size, statistics, 4, BLOCK)
    tl.debug_barrier()  # what one thread has stored the others load
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    of_target = tl.load(target_rows + row).to(tl.int64)
    draft += row * draft_stride
    target += of_target * target_stride
    statistics += row * 4
    draft_largest, draft_sum = _of_row(statistics)
    target_largest, target_sum = _of_row(normaliser + of_target * 2)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        log_q = _log2_probs(_load(draft, start + lanes, size), draft_largest, draft_sum)
        log_p = _log2_probs(_load(target, start + lanes, size), target_largest, target_sum)
        largest = tl.maximum(largest, tl.minimum(log_q, log_p))
    top = tl.max(largest, 0)
    total, below = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        log_q = _log2_probs(_load(draft, start + lanes, size), draft_largest, draft_sum)
        log_p = _log2_probs(_load(target, start + lanes, size), target_largest, target_sum)
        term = tl.exp2(tl.minimum(log_q, log_p) - top)
        total += term
        below += tl.where(log_q < log_p, term, 0.0)
    a = tl.sum(total, 0)
    # A comparison with NaN chooses the other side; so what makes a row NaN is added where it cannot get lost.
    nan_or_0 = (draft_largest - draft_largest) + (target_largest - target_largest)
    tl.store(statistics + 2, (top + tl.log2(a)) * LN_2 + nan_or_0)
    tl.store(statistics + 3, tl.sum(below, 0) / a + nan_or_0)


@triton.jit
def _gradient_kernel(
    draft, draft_stride, target, target_stride, target_rows, normaliser, statistics, size,
    weight, out, out_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight x (q / a)(s - [q < p]), s the sum of q where q < p; ``out`` may be ``draft``."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    of_target = tl.load(target_rows + row).to(tl.int64)
    draft += row * draft_stride
    target += of_target * target_stride
    out += row * out_stride
    statistics += row * 4
    draft_largest, draft_sum = _of_row(statistics)
    target_largest, target_sum = _of_row(normaliser + of_target * 2)
    log_a, share, scale = tl.load(statistics + 2), tl.load(statistics + 3), tl.load(weight + row)
    log2_a = log_a * LOG2_E_HIGH + log_a * LOG2_E_LOW
    rest = share * tl.exp2(log2_a) - 1
    for start in range(0, size, BLOCK):
        offsets = start + lanes
        log_q = _log2_probs(_load(draft, offsets, size), draft_largest, draft_sum)
        log_p = _log2_probs(_load(target, offsets, size), target_largest, target_sum)
        g = tl.exp2(tl.where(log_q < log_p, log_q - log2_a, log_q))
        g *= tl.where(log_q < log_p, scale * rest, scale * share)
        g = tl.where(scale == 0, 0.0, g)
        tl.store(out + offsets, g.to(out.dtype.element_ty), mask=offsets < size)


@triton.jit
def _fused_kernel(
    draft, draft_stride, target, target_stride, target_rows, normaliser, statistics, size,
    weight, out, out_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics, then the gradient, while the row is still in the cache."""
    _statistics_kernel(draft, draft_stride, target, target_stride, target_rows, normaliser, statistics, size, BLOCK)
    tl.debug_barrier()
    _gradient_kernel(
        draft, draft_stride, target, target_stride, target_rows, normaliser, statistics, size,
        weight, out, out_stride, BLOCK,
    )  # fmt: skip
