"""Products, norms and the gated activation that several stages share."""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums and nonlinearities of a storage type are computed in. Raises TypeError for other types."""
    types = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    if dtype not in types:
        raise TypeError(f"storage is {dtype}; wanted torch.float64, torch.float32 or torch.bfloat16")
    return types[dtype]


def keep(name: str, x: Tensor) -> Tensor:
    """The recorder that records nothing. A recorder returns what the next stage is to consume."""
    return x


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x W^T, accumulated wide and rounded once to ``dtype`` (that of x when not given).

    x [..., in], weight [out, in] -> [..., out]. The two gradients are accumulated wide as well.
    """
    compute = wide(x.dtype)
    return torch.nn.functional.linear(x.to(compute), weight.to(compute)).to(dtype or x.dtype)  # [..., out]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w x / sqrt(mean(x^2) + eps) over the last axis (spec.md section 4). x [..., d], weight [d] -> [..., d]."""
    wide_x = x.to(wide(x.dtype))
    root = torch.sqrt(wide_x.square().mean(-1, keepdim=True) + eps)  # [..., 1]
    return (weight.to(wide_x.dtype) * (wide_x / root)).to(x.dtype)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta) (report eq. 12 and 19). All [..., m]."""
    g, u = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    situ = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (situ * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)
