"""RMSNorm, SiTU-GLU and the output gate with closed-form gradients, in blocks of rows that stay in the cache.

Autograd keeps every wide intermediate of these; here the inputs, in the storage type, are all that is kept.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .backend import choose
from .kernels import native
from .ops import wide

BLOCK_ELEMENTS = 1 << 18  # of a block of rows: 1 MB in float32


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of about BLOCK_ELEMENTS elements each that cover ``rows`` rows of ``width``."""
    size = max(1, BLOCK_ELEMENTS // max(width, 1))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w x / sqrt(mean(x^2) + eps) over the last axis. x [..., d], weight [d] in any type -> [..., d]."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps) and n = x r: d_x = r (w d_y - n mean(w d_y n)), d_w = sum over rows d_y n."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rows, w = x.flatten(0, -2), weight.to(wide(x.dtype))
        y, inverse = rows.new_empty(rows.shape), rows.new_empty((len(rows), 1), dtype=w.dtype)
        for block in row_blocks(*rows.shape):
            part = rows[block].to(w.dtype)
            root = torch.sqrt(part.square().mean(-1, keepdim=True) + eps)
            inverse[block] = root.reciprocal()
            y[block] = (part / root).mul_(w)
        ctx.save_for_backward(x, weight, inverse)
        return y.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y):
        x, weight, inverse = ctx.saved_tensors
        rows, d_rows, w = x.flatten(0, -2), d_y.flatten(0, -2), weight.to(inverse.dtype)
        d_x, d_w = rows.new_empty(rows.shape), torch.zeros_like(w)
        for block in row_blocks(*rows.shape):
            normed = rows[block].to(w.dtype) * inverse[block]
            part = d_rows[block].to(w.dtype)
            d_w += (part * normed).sum(0)
            part = part * w
            mean = (part * normed).mean(-1, keepdim=True)
            d_x[block] = part.sub_(normed.mul_(mean)).mul_(inverse[block])
        return d_x.view(x.shape), d_w.to(weight.dtype), None


def situ_factors(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(g / beta), sigmoid(g), tanh(u / linear_beta), wide. All [N, m]."""
    g, u = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    return (g / beta).tanh_(), torch.sigmoid(g), (u / linear_beta).tanh_()


def situ(gate: Tensor, up: Tensor, betas: tuple[float, float], out: Tensor) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta), computed wide, to ``out``. All [N, m]."""
    beta, linear_beta = betas
    if _compiled(gate, up, out):
        native.situ(gate, up, beta, linear_beta, out)
        return out
    for rows in row_blocks(*gate.shape):
        tanh_g, sigmoid_g, tanh_u = situ_factors(gate[rows], up[rows], beta, linear_beta)
        out[rows] = tanh_g.mul_(sigmoid_g).mul_(beta).mul_(tanh_u.mul_(linear_beta))
    return out


def situ_gradient(gate: Tensor, up: Tensor, d_y: Tensor, betas, d_gate: Tensor, d_up: Tensor) -> None:
    """The gradients of ``situ`` for d_y, computed wide, to ``d_gate`` and ``d_up``. All [N, m].

    With a = tanh(g / beta), s = sigmoid(g), c = tanh(u / linear_beta): y = beta a s linear_beta c, so
    d_g = d_y linear_beta c s ((1 - a^2) + beta a (1 - s)) and d_u = d_y beta a s (1 - c^2).
    """
    beta, linear_beta = betas
    if _compiled(gate, up, d_gate, d_up) and d_y.dtype in native.DTYPES and d_y.stride(-1) == 1:
        native.situ_gradient(gate, up, d_y, beta, linear_beta, d_gate, d_up)
        return
    for rows in row_blocks(*gate.shape):
        a, s, c = situ_factors(gate[rows], up[rows], beta, linear_beta)
        d = d_y[rows].to(a.dtype)
        slope = (a.square().neg_().add_(1)).add_((1 - s).mul_(a).mul_(beta)).mul_(s)
        d_gate[rows] = slope.mul_(c).mul_(linear_beta).mul_(d)
        d_up[rows] = a.mul_(s).mul_(beta).mul_(c.square_().neg_().add_(1)).mul_(d)


def _compiled(*tensors: Tensor) -> bool:
    """Whether the C++ kernels take these: one type, contiguous rows, where a compiler was found."""
    alike = all(x.dtype == tensors[0].dtype and x.stride(-1) == 1 for x in tensors)
    return alike and choose(None, *tensors) == "native"


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU of gate and up [..., m], in their type."""
    return _SituGLU.apply(gate, up, beta, linear_beta)


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, *betas):
        ctx.save_for_backward(gate, up)
        ctx.betas, y = betas, gate.new_empty(gate.shape)
        situ(gate.flatten(0, -2), up.flatten(0, -2), betas, y.flatten(0, -2))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y):
        gate, up = ctx.saved_tensors
        d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        g, u, d, to_g, to_u = (x.flatten(0, -2) for x in (gate, up, d_y, d_gate, d_up))
        situ_gradient(g, u, d, ctx.betas, to_g, to_u)
        return d_gate, d_up, None, None


def sigmoid_gate(pre: Tensor, x: Tensor) -> Tensor:
    """sigmoid(pre) x in the type of pre. pre and x [..., n], x perhaps wider."""
    return _SigmoidGate.apply(pre, x)


class _SigmoidGate(torch.autograd.Function):
    """d_x = d_y s, d_pre = d_y x s (1 - s)."""

    @staticmethod
    def forward(ctx, pre, x):
        ctx.save_for_backward(pre, x)
        y = pre.new_empty(pre.shape)
        p, rows, out = (t.flatten(0, -2) for t in (pre, x, y))
        for block in row_blocks(*p.shape):
            out[block] = torch.sigmoid(p[block].to(wide(p.dtype))).mul_(rows[block])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y):
        pre, x = ctx.saved_tensors
        d_pre, d_x = pre.new_empty(pre.shape), x.new_empty(x.shape)
        p, rows, d, to_p, to_x = (t.flatten(0, -2) for t in (pre, x, d_y, d_pre, d_x))
        for block in row_blocks(*p.shape):
            s = torch.sigmoid(p[block].to(wide(p.dtype)))
            flow = d[block].to(s.dtype) * s
            to_x[block] = flow
            to_p[block] = flow.mul_(rows[block]).mul_(s.neg_().add_(1))
        return d_pre, d_x
