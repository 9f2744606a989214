"""The checks of speculative sampling on samplers with planted faults, and what stands in for PyTorch's generator."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from draftconf.conformance.adapters._uniforms import given, logarithm, sample, token_of
from draftconf.conformance.checks import sampling as check_sampling
from draftconf.conformance.checks.cases import unroll_cases
from draftconf.conformance.protocol.loading import load
from draftconf.conformance.protocol.subject import Subject
from draftconf.reference.config import Choices


class Sampler:
    """Algorithm 1 on PyTorch's own random numbers, from laws or from their logarithms."""

    protocol, logits = 1, False

    def describe(self):
        said = {"name": "sampler", "formats": {"storage": "float32"}, "layouts": ["mtp"]}
        return said | ({"sampled_from": "logits"} if self.logits else {})

    def speculative_sample(self, inputs, *, cotangents=None, forced=None):
        return sample(inputs, self.verify)

    def verify(self, p, q, token):
        if self.logits:
            p, q = logarithm(p).softmax(-1), logarithm(q).softmax(-1)
        if self.accepts(torch.rand(()), p[token] / q[token]):
            return token, True
        return torch.multinomial(self.residual(p, q), 1), False

    def accepts(self, u, ratio):
        return u < ratio

    def residual(self, p, q):
        left = (p - q).clamp(min=0)
        return left / left.sum()


class FromLogits(Sampler):
    logits = True


class AtMost(FromLogits):
    def accepts(self, u, ratio):
        return u <= ratio


class Padded(Sampler):
    def residual(self, p, q):
        return (p - q).clamp(min=0) + 1e-9


class FromTarget(FromLogits):
    def residual(self, p, q):
        return p


class Silent(Sampler):
    def speculative_sample(self, inputs, *, cotangents=None, forced=None):
        outputs = super().speculative_sample(inputs)
        outputs.pop("residual", None)
        return outputs


def judged(sampler, what: str, seed: int = 0) -> dict:
    subject, choices = Subject(sampler), Choices(draft_input="mtp")
    return check_sampling.check_sampling(subject, unroll_cases()[0], choices, "float32", seed, what)


@pytest.mark.parametrize("what", ["residual", "accepted", "token"])
@pytest.mark.parametrize("sampler", [Sampler(), FromLogits()])
@pytest.mark.parametrize("seed", range(20))
def test_honest_samplers_pass_whether_they_take_laws_or_logits(sampler, what, seed):
    assert judged(sampler, what, seed)["verdict"] == "pass"


def test_a_token_of_probability_zero_must_not_be_accepted_on_a_draw_of_zero():
    assert "draw = [0.25, 0.0, 0.5]" in judged(AtMost(), "accepted")["message"]
    assert judged(AtMost(), "token")["verdict"] == "fail"


@pytest.mark.parametrize("sampler", [Padded(), FromTarget()])
def test_a_replacement_from_another_law_is_seen(sampler):
    assert judged(sampler, "residual")["verdict"] == "fail"


def test_a_residual_may_be_absent_only_where_the_token_was_accepted():
    assert judged(Silent(), "residual")["message"] == "speculative_sample returned no output 'residual'"
    assert judged(Silent(), "accepted")["verdict"] == "pass"


def test_laws_that_arrive_as_logarithms_have_a_bound_of_their_own():
    class Undeclared(FromLogits):
        def describe(self):
            return super().describe() | {"sampled_from": "laws"}

    narrow, wide = (
        [judged(kind(), "residual", seed)["ratio"] for seed in range(20)] for kind in (Undeclared, FromLogits)
    )
    assert max(wide) < 0.2
    assert max(narrow) > 1  # the logarithm's own rounding, which no sampler could avoid


def test_given_numbers_replace_pytorchs_and_nothing_stays_replaced():
    before = torch.rand, torch.rand_like, torch.multinomial
    with given(np.array([0.1, 0.25, 0.75])) as laws:
        assert torch.rand(2, 3).tolist() == [[0.25] * 3] * 2
        assert torch.rand_like(torch.zeros(2, dtype=torch.float64)).tolist() == [0.25, 0.25]
        assert torch.multinomial(torch.tensor([[1.0, 1.0, 2.0]]), num_samples=1).tolist() == [[2]]
        assert laws[0].tolist() == [0.25, 0.25, 0.5]
        with pytest.raises(RuntimeError, match="nan"):
            torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)
    assert (torch.rand, torch.rand_like, torch.multinomial) == before


def test_token_of_never_draws_what_has_no_weight():
    assert [token_of([0.0, 0.5, 0.5, 0.0], u) for u in (0.0, 0.4999, 0.5, 1.0)] == [1, 1, 2, 2]


@pytest.mark.parametrize("name", ["llmcompressor", "transformers", "flashspec", "specdec", "naive_speculate"])
@pytest.mark.skipif(bool(find_spec("transformers")), reason="the packages are installed here")
def test_an_adapter_without_its_package_says_how_to_install_it(name):
    with pytest.raises(ValueError, match=f"requirements/matrix/{name.replace('_', '-')}.txt"):
        load(name)
