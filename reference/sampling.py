"""Speculative sampling of one token: accept the draft's token or draw from the residual (spec.md section 8).

The emitted token has exactly the target's law, and the acceptance probability is alpha = sum min(p, q) = exp(-LK loss).
"""

from typing import NamedTuple

import numpy as np

from .validate import require


class Sample(NamedTuple):
    """``token`` emitted, whether the draft's was ``accepted``, and the ``residual`` law [V]."""

    token: int
    accepted: bool
    residual: np.ndarray


def acceptance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """min(1, p_x / q_x) for every token; 1 where q_x is 0. [V]."""
    return np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=q > 0))


def residual_law(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """max(p - q, 0) / (1 - alpha); p itself where nothing is left. [V]."""
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0 else p


def inverse_cdf(law: np.ndarray, u: float) -> int:
    """The least token whose cumulative probability exceeds u; never one of probability 0."""
    return int(min(np.searchsorted(np.cumsum(law), u * law.sum(), side="right"), np.flatnonzero(law)[-1]))


def speculative_sample(p: np.ndarray, q: np.ndarray, draw: np.ndarray) -> Sample:
    """``draw`` holds three uniform numbers in [0, 1): the draft's token, the acceptance, the residual's token.

    Raises ValueError where p or q is no distribution or ``draw`` no three numbers of [0, 1).
    """
    p, q, draw = np.asarray(p, float), np.asarray(q, float), np.asarray(draw, float)
    for name, law in (("p", p), ("q", q)):
        require(law.ndim == 1 and law.size > 0, name, f"of shape {law.shape}", "one axis, [V]")
        require(bool((law >= 0).all()), name, f"negative at {int(np.argmin(law))}", "probabilities")
        require(abs(law.sum() - 1) <= 1e-6, name, f"of sum {law.sum()}", "sum 1")
    require(p.shape == q.shape, "q", f"of shape {q.shape}", str(p.shape))
    require(draw.shape == (3,) and bool(((draw >= 0) & (draw < 1)).all()), "draw", draw, "3 numbers in [0, 1)")
    x, residual = inverse_cdf(q, draw[0]), residual_law(p, q)
    accepted = bool(draw[1] < acceptance(p, q)[x])
    return Sample(x if accepted else inverse_cdf(residual, draw[2]), accepted, residual)


def speculative_chain(p: np.ndarray, q: np.ndarray, draws: np.ndarray) -> list[int]:
    """K drafts in a row: stop at the first rejection; after K acceptances one bonus token from the target.

    p [K + 1, V], q [K, V], draws [K + 1, 3]. Returns 1 to K + 1 tokens.
    """
    tokens = []
    for p_k, q_k, draw in zip(p, q, draws, strict=False):
        sample = speculative_sample(p_k, q_k, draw)
        tokens.append(sample.token)
        if not sample.accepted:
            return tokens
    return [*tokens, inverse_cdf(p[-1], draws[-1][0])]
