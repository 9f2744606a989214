"""What is refused before anything is computed, and that the sentence names the argument and the index."""

import re

import numpy as np
import pytest
from helpers import LAYOUTS, MICRO, assert_same_bits, case

from draftconf.reference.unroll import draft_sequence, unroll

DOCUMENTS = [[0, 0, 0, 0, 1, 1, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3]]


def put(at, value):
    """A change to a copy of an array."""

    def change(x):
        x = np.array(x)
        x[at] = value
        return x

    return change


INPUTS = {
    "tokens missing": ("tokens", None, "tokens is missing"),
    "mask missing": ("mask", None, "mask is missing"),
    "tokens flat": ("tokens", lambda x: x[0], r"tokens is of shape (8,)"),
    "no slots": ("tokens", lambda x: x[:, :0], r"tokens is of shape (2, 0)"),
    "tokens float": ("tokens", lambda x: x.astype(float), "tokens is of dtype float64; wanted an integer"),
    "token too large": ("tokens", put((1, 2), 11), "tokens[1, 2] is 11; wanted an id from 0 to 10"),
    "token negative": ("tokens", put((0, 4), -1), "tokens[0, 4] is -1; wanted an id"),
    "low narrow": ("low", lambda x: x[..., :5], "low is of shape (2, 8, 5); wanted (2, 8, 6)"),
    "mid short": ("mid", lambda x: x[:, :7], "mid is of shape (2, 7, 6)"),
    "high NaN": ("high", put((1, 0, 3), np.nan), "high[1, 0, 3] is nan; wanted finite"),
    "low infinite": ("low", put((0, 5, 0), np.inf), "low[0, 5, 0] is inf; wanted finite"),
    "target infinite": ("target_logits", put((0, 1, 10), -np.inf), "target_logits[0, 1, 10] is -inf; wanted finite"),
    "target vocabulary": ("target_logits", lambda x: x[..., :10], "target_logits is of shape (2, 8, 10)"),
    "mask int": ("mask", lambda x: x.astype(int), "mask is of dtype int64; wanted bool"),
    "mask shape": ("mask", lambda x: x[:1], "mask is of shape (1, 8)"),
    "documents shape": ("documents", lambda x: x[0], "documents is of shape (8,)"),
    "documents float": ("documents", lambda x: x.astype(float), "documents is of dtype float64"),
    "document returns": ("documents", put((1, 3), 4), "documents[1] is split"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "change", "words"), INPUTS.values(), ids=INPUTS)
def test_a_bad_input_is_refused_by_name_and_index(layout, name, change, words):
    params, inputs, config, choices = case({"draft_input": layout}, MICRO, documents=DOCUMENTS)
    if change is None:
        del inputs[name]
    else:
        inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=re.escape(words)):
        unroll(params, inputs, config, choices)


PARAMETERS = {
    "missing": ("fc.weight", None, "parameter fc.weight is missing; wanted an array of shape (6, 18)"),
    "transposed": ("fc.weight", lambda x: x.T, "parameter fc.weight is of shape (18, 6); wanted (6, 18)"),
    "NaN": ("self_attn.o_proj.weight", put((0, 1), np.nan), "self_attn.o_proj.weight[0, 1] is nan; wanted finite"),
    "infinite": ("hnorm.weight", put(2, np.inf), "hnorm.weight[2] is inf; wanted finite"),
    "of no layout": ("lm_head.weight", lambda x: np.zeros(3), "lm_head.weight"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "change", "words"), PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("call", [unroll, draft_sequence], ids=["unroll", "draft_sequence"])
def test_a_bad_parameter_is_refused_by_name_and_index(call, layout, name, change, words):
    params, inputs, config, choices = case({"draft_input": layout}, MICRO)
    if change is None:
        del params[name]
    else:
        params[name] = change(params.get(name))
    with pytest.raises(ValueError, match=re.escape(words)):
        call(params, inputs, config, choices)


def test_parameters_of_the_other_layout_are_refused():
    params, inputs, config, choices = case({"draft_input": "eagle3"}, MICRO)
    with pytest.raises(ValueError, match=r"eh_proj\.weight"):
        unroll(params | {"eh_proj.weight": np.zeros((6, 12))}, inputs, config, choices)


def test_attention_residual_weights_of_a_checkpoint_are_accepted_and_ignored():
    params, inputs, config, choices = case({}, MICRO)
    extra = {f"{which}_res_norm.weight": np.ones(6) for which in ("self_attention", "mlp")}
    extra |= {f"{which}_res_proj.weight": np.ones((1, 6)) for which in ("self_attention", "mlp")}
    a, b = unroll(params, inputs, config, choices), unroll(params | extra, inputs, config, choices)
    assert_same_bits(b.total_loss, a.total_loss)
    assert set(b.grads) == set(a.grads)


REDUCED = {
    "missing": (None, "draft_to_target is missing"),
    "short": (lambda x: x[:-1], "draft_to_target is of shape (6,); wanted (7,)"),
    "outside": (put(3, 11), "draft_to_target[3] is 11; wanted an id from 0 to 10"),
    "twice": (lambda x: put(0, x[1])(x), "draft_to_target is not one to one"),
    "float": (lambda x: x.astype(float), "draft_to_target is of dtype float64"),
}


@pytest.mark.parametrize(("change", "words"), REDUCED.values(), ids=REDUCED)
def test_a_bad_draft_vocabulary_is_refused(change, words):
    params, inputs, config, choices = case({"head": "reduced"}, MICRO)
    ids = inputs.pop("draft_to_target")
    if change is not None:
        inputs["draft_to_target"] = change(ids)
    with pytest.raises(ValueError, match=re.escape(words)):
        unroll(params, inputs, config, choices)


GIVEN = {
    "missing": (None, "tokens_by_step is missing"),
    "one step short": (lambda x: x[:-1], "tokens_by_step is of shape (2, 2, 8); wanted (3, 2, 8)"),
    "outside": (put((2, 1, 3), -4), "tokens_by_step[2, 1, 3] is -4; wanted an id"),
    "float": (lambda x: x.astype(float), "tokens_by_step is of dtype float64"),
}


@pytest.mark.parametrize(("change", "words"), GIVEN.values(), ids=GIVEN)
def test_bad_given_tokens_are_refused(change, words):
    params, inputs, config, choices = case({"token_source": "given"}, MICRO)
    tokens = inputs.pop("tokens_by_step")
    if change is not None:
        inputs["tokens_by_step"] = change(tokens)
    with pytest.raises(ValueError, match=re.escape(words)):
        unroll(params, inputs, config, choices)


def test_what_no_slot_reads_is_not_checked():
    """Padding, and the token and target aligned to a document's last slot: they belong to the next one."""
    params, inputs, config, choices = case({}, MICRO, documents=DOCUMENTS)
    a = unroll(params, inputs, config, choices)
    for slot in ((0, 3), (0, 5), (0, 6), (1, 7)):
        inputs["tokens"][slot], inputs["target_logits"][slot] = -9, np.nan
    inputs["low"][0, 7] = np.inf
    b = unroll(params, inputs, config, choices)
    assert_same_bits(b.total_loss, a.total_loss)
    assert all(np.isfinite(x).all() for x in b.trace.values())


def test_choices_that_do_not_fit_the_sizes_are_refused_by_the_unroll():
    params, inputs, config, choices = case({}, MICRO)
    with pytest.raises(ValueError, match="step_weights has 2 entries; wanted num_steps, 3"):
        unroll(params, inputs, config, choices.replace(step_weights=(1, 1)))


DRAFTING = {
    "token outside": ("tokens", put(1, 11), "tokens[1] is 11; wanted an id from 0 to 10"),
    "given outside": ("given", put(0, -1), "given[0] is -1; wanted an id"),
    "given short": ("given", lambda x: x[:1], "given is of shape (1,); wanted (2,)"),
    "given missing": ("given", None, "given is missing"),
    "feature NaN": ("high", put((1, 2), np.nan), "high[1, 2] is nan; wanted finite"),
    "feature narrow": ("low", lambda x: x[:, :5], "low is of shape (4, 5); wanted (4, 6)"),
    "feature missing": ("mid", None, "mid is missing"),
    "no tokens": ("tokens", lambda x: x[:0], "tokens is of shape (0,)"),
}


@pytest.mark.parametrize(("name", "change", "words"), DRAFTING.values(), ids=DRAFTING)
def test_a_bad_input_of_draft_sequence_is_refused_by_name(name, change, words):
    params, inputs, config, choices = case({}, MICRO)
    prefix = {key: inputs[key][0, :4] for key in ("tokens", "low", "mid", "high")} | {"given": np.array([1, 2])}
    if change is None:
        del prefix[name]
    else:
        prefix[name] = change(prefix[name])
    with pytest.raises(ValueError, match=re.escape(words)):
        draft_sequence(params, prefix, config, choices)
