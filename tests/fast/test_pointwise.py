"""SiTU-GLU and its gradient by each backend against the formula in float64, over magnitudes and odd shapes."""

import pytest
import torch

from draftconf.fast import backend, pointwise
from draftconf.fast.kernels import build

BETAS = 4.0, 25.0
TINY = 2.0**-90  # a sigmoid below 2^-126 is flushed to zero, and multiplied by 100
needs_compiler = pytest.mark.skipif(build.library() is None, reason=build.problem() or "built")
BACKENDS = ["eager", pytest.param("native", marks=needs_compiler)]


def exact(gate, up, d):
    """Value, d_gate, d_up and the sizes of the terms that each is a sum of; 1 - tanh^2 as 1 / cosh^2."""
    (beta, linear_beta), g, u, d = BETAS, gate.double(), up.double(), d.double()
    a, c, s, rest = torch.tanh(g / beta), torch.tanh(u / linear_beta), torch.sigmoid(g), torch.sigmoid(-g)
    slopes = torch.cosh(g / beta).pow(-2), torch.cosh(u / linear_beta).pow(-2)
    scale = linear_beta * c * s * d
    terms = scale * slopes[0], scale * beta * a * rest
    value, d_up = beta * a * s * linear_beta * c, beta * a * s * slopes[1] * d
    return (value, sum(terms), d_up), (value.abs(), sum(t.abs() for t in terms), d_up.abs())


def computed(name, gate, up, d):
    with backend.using(name):
        value, d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(up)
        pointwise.situ(gate, up, BETAS, value)
        pointwise.situ_gradient(gate, up, d, BETAS, d_gate, d_up)
    return value, d_gate, d_up


def inputs(rows, width, dtype):
    g = torch.Generator().manual_seed(rows)
    scale = 10 ** torch.empty(rows, 1).uniform_(-4, 1.7, generator=g)
    both = (scale * torch.randn(rows, 2 * width, generator=g)).to(dtype)
    return *both.chunk(2, dim=-1), torch.randn(rows, width, generator=g)  # strided rows


@needs_compiler
@pytest.mark.parametrize("width", [1, 15, 16, 333])
def test_the_kernel_is_right_to_a_few_units_in_the_last_place(width):
    gate, up, d = inputs(400, width, torch.float32)
    for actual, wanted, size in zip(computed("native", gate, up, d), *exact(gate, up, d), strict=True):
        units = (actual.double() - wanted).abs() / (size + TINY) * 2**24
        assert units.max() < 16, f"{units.max():.1f} units at {divmod(int(units.argmax()), width)}"


def test_eager_is_right_to_a_few_units_of_the_factors():
    """It takes tanh^2 and the sigmoid from 1, which is exact in units of 1 only."""
    gate, up, d = inputs(400, 64, torch.float32)
    for actual, wanted in zip(computed("eager", gate, up, d), exact(gate, up, d)[0], strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_bfloat16_is_rounded_once(name):
    gate, up, d = inputs(200, 64, torch.bfloat16)
    for actual, wanted, size in zip(computed(name, gate, up, d), *exact(gate, up, d), strict=True):
        near = size > 1e-3
        assert ((actual.double() - wanted).abs() / size)[near].max() < 2**-8 * 1.01


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_finite_spreads_and_extremes_do_not(name):
    gate = torch.tensor([[torch.nan, 1.0, torch.inf, -torch.inf, 1e30, -1e30, 0.0]])
    up = torch.tensor([[1.0, torch.nan, 1.0, 1.0, 1e30, 1e30, 1.0]])
    value, d_gate, d_up = computed(name, gate, up, torch.ones_like(up))
    assert value.isnan().tolist() == [[True, True, False, False, False, False, False]]
    assert d_gate.isnan().tolist() == d_up.isnan().tolist() == value.isnan().tolist()
    assert value[0, 3] == 0
    assert value[0, 4] == 100
    assert value[0, 5] == 0
    assert value[0, 6] == 0


@needs_compiler
def test_the_compiled_kernel_is_the_one_that_runs(monkeypatch):
    gate, up, d = inputs(4, 8, torch.float32)
    monkeypatch.setattr(pointwise, "situ_factors", None)  # what the eager backend needs
    computed("auto", gate, up, d)
    with pytest.raises(TypeError):
        computed("eager", gate, up, d)
