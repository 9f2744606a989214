"""The three given uniform numbers in place of PyTorch's generator, for samplers that draw their own.

The rules of a sampler are its own code, run as it is; what is exchanged is where its random numbers come from. The
proposed token is the caller's: ``token_of`` draws it from q with the first number. ``torch.rand`` and its like give
the second. ``torch.multinomial`` draws with the third by the inverse of the cumulative law, after its own checks of the
weights, and the law that it was handed is kept: that is the ``residual`` that the sampler draws from.
"""

from contextlib import contextmanager
from importlib.metadata import version
from unittest import mock

import numpy as np
import torch


def token_of(weights, uniform: float) -> int:
    """The least token whose cumulative probability exceeds ``uniform``; never one of weight 0. weights [V]."""
    weights = np.asarray(weights, np.float64)
    place = np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right")
    return int(min(place, np.flatnonzero(weights)[-1]))


@contextmanager
def given(draw):
    """Within it, PyTorch's random numbers are ``draw`` [3]. Gives the list of laws that tokens were drawn from."""
    rand, rand_like, multinomial, laws = torch.rand, torch.rand_like, torch.multinomial, []

    def from_law(weights, num_samples, *args, **kwargs):
        multinomial(weights, num_samples, *args, **kwargs)  # raises what it raises for weights that are no law
        rows = weights.detach().double().reshape(-1, weights.shape[-1])
        laws.append((rows / rows.sum(-1, keepdim=True)).float().numpy()[0])
        tokens = [[token_of(row, float(draw[2]))] for row in rows]
        return torch.tensor(tokens).reshape(*weights.shape[:-1], 1)

    with (
        mock.patch.object(torch, "rand", lambda *a, **k: torch.full_like(rand(*a, **k), float(draw[1]))),
        mock.patch.object(torch, "rand_like", lambda *a, **k: torch.full_like(rand_like(*a, **k), float(draw[1]))),
        mock.patch.object(torch, "multinomial", from_law),
    ):
        yield laws


class Sampler:
    """Base of an adapter of a sampler: a subclass says its ``package`` on PyPI and ``url``, and has ``verify``.

    ``described`` is what its description has beyond that; most samplers take logits.
    """

    protocol = 1
    package = name = url = ""
    described: dict = {"sampled_from": "logits"}

    def describe(self) -> dict:
        about = {"name": self.name or self.package, "version": version(self.package), "url": self.url}
        return about | {"formats": {"storage": "float32"}, "layouts": ["mtp"]} | self.described

    def speculative_sample(self, inputs, *, cotangents=None, forced=None) -> dict:
        return sample(inputs, self.verify)


def sample(inputs, verify) -> dict:
    """One call of a sampler. ``verify(p, q, token)`` gives the emitted token and whether the proposed one was accepted.

    ``residual`` is the law that the replacement was drawn from, if there was one.
    """
    p, q = torch.tensor(inputs["p"]), torch.tensor(inputs["q"])
    with given(inputs["draw"]) as laws:
        token, accepted = verify(p, q, token_of(inputs["q"], inputs["draw"][0]))
    outputs = {"token": np.array(int(token)), "accepted": np.array(bool(accepted))}
    return outputs if accepted else outputs | {"residual": laws[0]}


def logarithm(law: torch.Tensor) -> torch.Tensor:
    """log of a law, in float64 and then rounded to the law's own type."""
    return law.double().log().to(law.dtype)
