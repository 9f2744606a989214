"""Wrong speculative sampling: proposal, acceptance, residual, the three draws."""

import torch

from draftconf.fast import sampling

from .core import area, patch

MUTANTS: list = []
mutant = area("sampling", MUTANTS)
LAW = "accept with min(1, p/q), else draw from max(p-q, 0)/(1-alpha) (spec.md 8)"
SAMPLE = {"methods": ("speculative_sample",)}


def sampler(residual=None, accept=None, propose=None, final=None):
    def wrapper(p, q, draw):
        proposal = sampling.inverse_cdf(q, draw[0]) if propose is None else propose(p, q, draw)
        accepted = draw[1] * q[proposal] < p[proposal] if accept is None else accept(p, q, draw, proposal)
        excess = (p - q).clamp(min=0)
        mass = excess.sum()
        rest = torch.where(mass > 0, excess / torch.where(mass > 0, mass, 1), p) if residual is None else residual(p, q)
        token = sampling.inverse_cdf(rest, draw[2]) if final is None else final(p, q, rest, draw)
        return torch.where(accepted, proposal, token), accepted, rest

    return patch(sampling, "speculative_sample", wrapper)


@mutant("speculative_sample", "forward", None, LAW, "S01: Spec-RL #14", **SAMPLE)
def replacement_drawn_from_the_target():
    return sampler(residual=lambda p, q: p)


@mutant("speculative_sample", "forward", None, LAW, "S01", **SAMPLE)
def residual_not_normalised():
    return sampler(residual=lambda p, q: torch.where((p - q).clamp(min=0).sum() > 0, (p - q).clamp(min=0), p))


@mutant(
    "speculative_sample",
    "forward",
    None,
    "alpha = 1: the residual is p itself",
    "S05: jaymody #5; TorchCode #16",
    **SAMPLE,
)
def residual_of_equal_laws_is_nan():
    return sampler(
        residual=lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(),
        final=lambda p, q, rest, draw: sampling.inverse_cdf(p, draw[2]),
    )


@mutant(
    "speculative_sample",
    "forward",
    None,
    "q is the law the token was drawn from",
    "S02: jaymody #3, #4; EAGLE #221",
    **SAMPLE,
)
def greedy_proposal():
    return sampler(propose=lambda p, q, draw: q.argmax())


@mutant("speculative_sample", "forward", None, LAW, "S04: mlx-swift-lm #459; mlxcel #902", **SAMPLE)
def accepted_when_two_draws_agree():
    return sampler(accept=lambda p, q, draw, x: sampling.inverse_cdf(p, draw[1]) == x)


@mutant("speculative_sample", "forward", None, LAW, "S04", **SAMPLE)
def accepted_with_the_inverse_ratio():
    return sampler(accept=lambda p, q, draw, x: draw[1] * p[x] < q[x])


@mutant(
    "speculative_sample", "forward", None, "three independent draws", "S07: vllm-ascend #13608; vLLM #17498", **SAMPLE
)
def acceptance_reuses_the_proposals_draw():
    return sampler(accept=lambda p, q, draw, x: draw[0] * q[x] < p[x])


@mutant("speculative_sample", "forward", None, "three independent draws", "S07: vllm-ascend #13755", **SAMPLE)
def replacement_reuses_the_acceptances_draw():
    return sampler(final=lambda p, q, rest, draw: sampling.inverse_cdf(rest, draw[1]))


@mutant("speculative_sample", "forward", None, "a token of probability 0 is never drawn", "own", **SAMPLE)
def replacement_of_probability_zero():
    return sampler(final=lambda p, q, rest, draw: (sampling.inverse_cdf(rest, draw[2]) + 1) % len(p))


@mutant("speculative_sample", "forward", None, LAW, "own", **SAMPLE)
def always_accepted():
    return sampler(accept=lambda p, q, draw, x: draw[1] >= 0)
