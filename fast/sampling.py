"""Speculative sampling of one token (spec.md section 8)."""

import torch
from torch import Tensor


def inverse_cdf(p: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds ``uniform`` times the total, never one of probability 0.

    p [V], not necessarily summing to one; uniform [] in [0, 1) -> int64 [].
    """
    cumulative = p.cumsum(-1)
    token = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return torch.minimum(token, torch.nonzero(p > 0).amax())


def speculative_sample(p: Tensor, q: Tensor, draw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token with exactly the law p, proposed by q: (token int64 [], accepted bool [], residual [V]).

    draw: three uniform numbers in [0, 1), for the proposal, its acceptance with probability min(1, p_x / q_x), and the
    draw from max(p - q, 0) / (1 - alpha) after a rejection. With alpha = 1 the residual is p itself.
    """
    proposal = inverse_cdf(q, draw[0])
    accepted = draw[1] * q[proposal] < p[proposal]
    excess = (p - q).clamp(min=0)
    mass = excess.sum()
    residual = torch.where(mass > 0, excess / torch.where(mass > 0, mass, 1), p)
    return torch.where(accepted, proposal, inverse_cdf(residual, draw[2])), accepted, residual
