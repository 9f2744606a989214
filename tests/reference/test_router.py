"""Routing and experts (spec.md section 4, stages ``route`` to ``moe_combine``)."""

import numpy as np
import pytest
from helpers import MICRO, assert_near, assert_same_bits, case
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from draftconf.reference.config import DraftConfig
from draftconf.reference.moe import route, top_experts
from draftconf.reference.unroll import unroll

scores = hnp.arrays(float, (3, 8), elements=st.floats(1e-300, 1.0))
biases = hnp.arrays(float, 8, elements=st.floats(-2, 2))


@given(s=scores, bias=biases, count=st.integers(1, 8), factor=st.floats(0.1, 10))
def test_routing_weights_sum_to_the_scaling_factor(s, bias, count, factor):
    weights = route(s, top_experts(s, bias, count), factor, 0.0)
    assert weights.shape == (3, count)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), factor, rtol=1e-14)


@given(s=scores, bias=biases, count=st.integers(1, 8))
def test_the_chosen_experts_are_distinct_and_no_other_ranks_above_them(s, bias, count):
    for row, chosen in zip(s + bias, top_experts(s, bias, count), strict=True):
        others = np.setdiff1d(np.arange(8), chosen)
        assert len(set(chosen.tolist())) == count
        assert row[chosen].min() >= max(row[others], default=-np.inf)
        assert chosen.dtype == np.int32


@given(levels=hnp.arrays(int, 8, elements=st.integers(0, 2)), count=st.integers(1, 8))
def test_ties_give_the_lowest_ids_in_order(levels, count):
    want = sorted(range(8), key=lambda e: (-levels[e], e))[:count]
    assert top_experts(levels / 4.0, np.zeros(8), count).tolist() == want


def test_the_bias_chooses_and_never_weighs():
    s, bias = np.array([0.6, 0.5, 0.1]), np.array([0.0, 0.0, 1.0])
    chosen = top_experts(s, bias, 2)
    weights = dict(zip(chosen.tolist(), route(s, chosen, 1.0, 0.0), strict=True))
    assert set(weights) == {0, 2}
    assert f"{weights[2]:.4f} {weights[0]:.4f}" == "0.1429 0.8571"


@given(s=scores, bias=biases, shift=st.floats(-1, 1))
def test_weights_of_given_experts_do_not_read_the_bias(s, bias, shift):
    chosen = top_experts(s, bias, 3)
    want = np.take_along_axis(s, chosen, axis=-1)
    np.testing.assert_allclose(route(s, chosen, 1.5, 0.0), 1.5 * want / want.sum(axis=-1, keepdims=True), rtol=1e-15)


def test_a_bias_that_keeps_the_choice_changes_nothing_at_all():
    params, inputs, config, choices = case({}, MICRO)
    bias = "block_sparse_moe.gate.e_score_correction_bias"
    a = unroll(params, inputs, config, choices)
    b = unroll(params | {bias: params[bias] + 0.25}, inputs, config, choices)
    assert all((a.decisions[key] == b.decisions[key]).all() for key in a.decisions)
    assert_same_bits(b.total_loss, a.total_loss)


@pytest.mark.parametrize("change", [{}, {"routing_weight": "before_down"}, {"quantize_hidden": False}], ids=str)
def test_an_expert_without_tokens_has_exactly_zero_gradient_and_no_influence(change):
    params, inputs, config, choices = case(change, MICRO)
    moe = "block_sparse_moe."
    params[moe + "gate.e_score_correction_bias"] = np.array([0.0, -5.0, 0.0])
    a = unroll(params, inputs, config, choices)
    for w in ("w1", "w2", "w3"):
        assert (a.grads[f"{moe}experts.1.{w}.weight"] == 0).all()
        assert np.abs(a.grads[f"{moe}experts.0.{w}.weight"]).max() > 0
    assert (a.grads[moe + "gate.weight"][1] == 0).all()
    changed = {f"{moe}experts.1.{w}.weight": params[f"{moe}experts.1.{w}.weight"] * 100 for w in ("w1", "w2", "w3")}
    b = unroll(params | changed, inputs, config, choices)
    assert_same_bits(b.total_loss, a.total_loss)
    for name, grad in a.grads.items():
        assert_same_bits(b.grads[name], grad, name)


def test_with_every_expert_chosen_the_gate_still_gets_a_gradient_from_the_weights():
    config = DraftConfig(**{**MICRO.to_dict(), "num_experts_per_token": 3})
    result = unroll(*case({}, config))
    assert np.abs(result.grads["block_sparse_moe.gate.weight"]).min() > 0


def test_a_single_chosen_expert_has_the_whole_factor_and_the_gate_no_gradient():
    config = DraftConfig(**{**MICRO.to_dict(), "num_experts_per_token": 1})
    result = unroll(*case({}, config))
    assert (result.trace["1/route"] == config.routed_scaling_factor).all()
    assert np.abs(result.grads["block_sparse_moe.gate.weight"]).max() < 1e-15


@pytest.mark.parametrize("factor", [0.5, 2.5])
def test_the_factor_scales_the_combined_output_before_its_norm(factor):
    """The norm behind it hides the factor from the loss almost entirely; the stage itself shows it."""
    config = DraftConfig(**{**MICRO.to_dict(), "routed_scaling_factor": factor})
    plain = DraftConfig(**{**MICRO.to_dict(), "routed_scaling_factor": 1.0})
    a, b = unroll(*case({}, config)), unroll(*case({}, plain))
    assert_near(a.trace["1/moe_combine"], factor * b.trace["1/moe_combine"])
