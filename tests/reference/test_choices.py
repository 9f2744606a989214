"""What each choice of spec.md section 9 changes: the first value of the unroll that differs, and what that value is."""

import numpy as np
import pytest
from helpers import LAYOUTS, MICRO, NEEDED, assert_near, assert_same_bits, case

from draftconf.reference.config import ALTERNATIVES, DraftConfig
from draftconf.reference.layer import own_tokens
from draftconf.reference.loss import lk_loss, target_log_probs
from draftconf.reference.moe import route
from draftconf.reference.unroll import unroll

DOCUMENTS = [[0, 0, 0, 0, 0, 1, 1, 1], [3, 3, 3, 3, 3, 3, 3, 3]]
MOE_ONLY = "nothing"  # layout eagle3 has no routed experts

#: (choice, value): the first difference from the default, in data order; in layout eagle3 where that is another one.
FIRST_CHANGE = {
    ("draft_input", "eagle3"): "1/draft_input",
    ("head", "own"): "gradient of shared_head.head.weight",
    ("head", "reduced"): "1/logits",
    ("reduced_target", "renormalized"): "1/lk_loss",
    ("reduced_supervision", "argmax_inside"): "1/step_loss",
    ("trained", "freeze_head_norm"): "gradient of shared_head.norm.weight",
    ("target_alignment", "fixed"): "2/lk_loss",
    ("mask_alignment", "token"): "nothing",  # ``align`` has applied it; see test_align.py
    ("mask_alignment", "slot"): "nothing",
    ("token_source", "own"): "2/embed",
    ("token_source", "given"): "1/embed",
    ("step_weights", "decay"): "total loss",
    ("step_weights", "decay_normalized"): "total loss",
    ("reduction", "all_slots"): "1/step_loss",
    ("routing_weight", "before_down"): ("1/mx_hidden", MOE_ONLY),
    ("renormalize_epsilon", 1e-20): "nothing",  # at ordinary scores; see below
    ("latent_norm_eps", 1e-6): "1/mla_query.norm",
    ("feature_norm", "per_chunk"): "1/fusion",
    ("feature_norm", "joint"): "1/fusion",
    ("recycled_feature", "post_norm"): "2/draft_input.hnorm",
    ("zero_first_embedding", True): "1/embed",
    ("detach_between_steps", True): "gradient of fc.weight",
    ("mx_scale_rule", "ceil"): ("1/mx_input", MOE_ONLY),
    ("mx_scale_rule", "rceil"): ("1/mx_input", MOE_ONLY),
    ("mx_scale_rule", "even"): ("1/mx_input", MOE_ONLY),
    ("mxfp8_element", "e5m2"): ("1/mx_input", MOE_ONLY),
    ("quantize_hidden", False): ("1/mx_hidden", MOE_ONLY),  # which is no longer there
    ("quantize_source", "bfloat16"): ("1/mx_input", MOE_ONLY),
    ("ste", "clipped"): ("gradient of fc.weight", MOE_ONLY),
}


def test_every_alternative_states_what_it_changes():
    listed = {(field, value) for field, (_, *others) in ALTERNATIVES.items() for value in others}
    assert listed == set(FIRST_CHANGE)


def first_difference(got, want) -> str:
    """The first stage value, else the total, else the first gradient, that is not the same in every bit."""

    def same(a, b):
        return b is not None and a.shape == b.shape and a.tobytes() == b.tobytes()

    for key, x in want.trace.items():
        if not key.endswith(".grad") and not same(x, got.trace.get(key)):
            return key
    if got.total_loss != want.total_loss:
        return "total loss"
    for name in {**want.grads, **got.grads}:
        if name not in want.grads or not same(want.grads[name], got.grads.get(name)):
            return f"gradient of {name}"
    return "nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("field", "value"), FIRST_CHANGE, ids=str)
def test_an_alternative_changes_what_it_says_and_nothing_before(layout, field, value):
    base = {"draft_input": layout, **NEEDED.get(field, {})}
    if field == "draft_input":
        base["draft_input"] = "mtp"
    params, inputs, config, choices = case(base, MICRO, seed=5, documents=DOCUMENTS)
    inputs["mask"][:] = True
    own_params, own_inputs, own_config, own_choices = case({**base, field: value}, MICRO, seed=5, documents=DOCUMENTS)
    for name, x in own_params.items():
        if name in params and params[name].shape == x.shape:
            own_params[name] = params[name]
    got = unroll(own_params, own_inputs | inputs, own_config, own_choices)
    stated = FIRST_CHANGE[field, value]
    stated = stated if isinstance(stated, str) else stated[LAYOUTS.index(layout)]
    assert first_difference(got, unroll(params, inputs, config, choices)) == stated


def test_an_epsilon_of_1e_20_in_the_routing_weights_shows_at_scores_of_that_size_only():
    experts = np.array([[0, 2]], np.int32)
    for score, want in ((0.3, 0.5), (1e-20, 1 / 3)):
        scores = np.full((1, 3), score)
        assert route(scores, experts, 1.0, 0.0).tolist() == [[0.5, 0.5]]
        assert_near(route(scores, experts, 1.0, 1e-20), np.full((1, 2), want))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("uniform", [1 / 4] * 4),
        ("decay", [1, 0.8, 0.64, 0.512]),
        ("decay_normalized", [1 / 2.952, 0.8 / 2.952, 0.64 / 2.952, 0.512 / 2.952]),
        ((2.0, 0.0, 1.0, 0.5), [2.0, 0.0, 1.0, 0.5]),
    ],
)
def test_the_total_is_the_weighted_sum_of_the_step_losses(layout, name, weights):
    config = DraftConfig(**{**MICRO.to_dict(), "num_steps": 4})
    arguments = case({"draft_input": layout, "step_weights": name}, config)
    result = unroll(*arguments)
    assert_near(result.total_loss, np.dot(weights, result.step_losses))
    assert_near(np.array(arguments[3].weights(4)), np.array(weights))


@pytest.mark.parametrize("reduction", ALTERNATIVES["reduction"])
def test_a_step_loss_is_the_mean_over_the_supervised_slots_or_over_all_slots(reduction):
    result = unroll(*case({"reduction": reduction}, MICRO, documents=DOCUMENTS))
    for losses, supervised, step_loss in zip(result.slot_losses, result.supervised, result.step_losses, strict=True):
        assert 0 < supervised.sum() < 16
        assert_near(step_loss, losses[supervised].sum() / (supervised.sum() if reduction == "supervised" else 16))


def test_own_tokens_are_the_first_arg_max_as_target_ids():
    logits = np.array([[[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, 0.0]]])
    assert own_tokens(logits, None).tolist() == [[1, 0, 3]]
    assert own_tokens(logits, np.array([40, 7, 99, 3])).tolist() == [[7, 40, 3]]


def test_own_tokens_leave_the_target_unchanged():
    for head in ("frozen_target", "reduced"):
        params, inputs, config, choices = case({"token_source": "own", "head": head}, MICRO)
        own = unroll(params, inputs, config, choices)
        ids = inputs.get("draft_to_target", np.arange(config.vocab_size))
        for k in (2, 3):
            drafted = ids[np.argmax(own.trace[f"{k - 1}/logits"], axis=-1)]
            assert_same_bits(own.decisions[f"{k}/tokens"], drafted.astype(np.int32))
            assert_same_bits(own.trace[f"{k}/embed"], params["embed_tokens.weight"][drafted])
        given = {"tokens_by_step": np.stack([inputs["tokens"], *(own.decisions[f"{k}/tokens"] for k in (2, 3))])}
        other = unroll(params, inputs | given, config, choices.replace(token_source="given"))
        assert_near(other.slot_losses[other.supervised], own.slot_losses[own.supervised])


def test_a_zeroed_first_embedding_is_that_of_the_first_slot_of_each_document_at_step_1_only():
    params, inputs, config, choices = case({"zero_first_embedding": True}, MICRO, documents=[[0, 0, 0, 1, 1, 1, -1, 4]])
    trace = unroll(params, inputs, config, choices).trace
    zero = (trace["1/embed"] == 0).all(axis=-1)[0]
    assert zero[[0, 3, 7]].all()
    assert not zero[[1, 2, 4, 5]].any()
    assert not (trace["2/embed"] == 0).all(axis=-1).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_detaching_cuts_the_recycled_feature_and_leaves_earlier_keys_and_values(layout):
    """With the loss of step 2 alone, the fused feature is reached through the step-1 keys and values only."""
    arguments = case({"draft_input": layout, "step_weights": (0.0, 1.0, 0.0)}, MICRO)
    *rest, choices = arguments
    attached, detached = unroll(*arguments), unroll(*rest, choices.replace(detach_between_steps=True))
    assert_same_bits(detached.trace["2/logits"], attached.trace["2/logits"])
    for stage in ("layer_output", "shared_experts" if layout == "mtp" else "dense_mlp"):
        assert np.abs(attached.trace[f"1/{stage}.grad"]).max() > 0
        assert (detached.trace[f"1/{stage}.grad"] == 0).all()
    assert np.abs(detached.trace["1/mla_keyvalue.grad"]).max() > 0
    assert np.abs(detached.grads["fc.weight"]).max() > 0


def test_argmax_inside_supervises_only_slots_whose_target_arg_max_is_in_the_draft_vocabulary():
    params, inputs, config, choices = case({"head": "reduced"}, MICRO, slots=12)
    inside = np.isin(inputs["target_logits"].argmax(axis=-1), inputs["draft_to_target"])
    assert 0 < inside.sum() < inside.size
    every = unroll(params, inputs, config, choices).supervised
    some = unroll(params, inputs, config, choices.replace(reduced_supervision="argmax_inside")).supervised
    for k in range(3):
        assert_same_bits(some[k, :, : 12 - k], every[k, :, : 12 - k] & inside[:, k:])


def test_fixed_alignment_compares_every_step_with_the_target_of_step_1():
    params, inputs, config, choices = case({"target_alignment": "fixed"}, MICRO)
    trace = unroll(params, inputs, config, choices).trace
    for k in (1, 2, 3):
        want = [lk_loss(trace[f"{k}/logits"][0, j], target_log_probs(inputs["target_logits"][0, j])) for j in range(6)]
        assert_near(trace[f"{k}/lk_loss"][0, :6], np.array(want))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_feature_taps_are_recorded_and_not_computed(layout):
    *rest, choices = case({"draft_input": layout}, MICRO)
    taps = choices.replace(feature_tap="mixture,block_sum,output_mixture_normed")
    assert first_difference(unroll(*rest, taps), unroll(*rest, choices)) == "nothing"
    assert taps.to_dict()["feature_tap"] == "mixture,block_sum,output_mixture_normed"
