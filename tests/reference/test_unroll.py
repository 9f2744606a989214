"""The unroll: equal to a second, literal implementation and to drafting one token after another, and independent of
whatever it must not read (spec.md sections 3, 4, 7, 8)."""

import numpy as np
import pytest
from helpers import LAYOUTS, MICRO, alternatives, assert_near, assert_same_bits, case, label
from slot_by_slot import slot_by_slot

from draftconf.reference.attention import visible
from draftconf.reference.config import DraftConfig
from draftconf.reference.unroll import draft_sequence, unroll

DOCUMENTS = [[0, 0, 0, 0, 0, 1, 1, 1], [3, 3, 3, 3, 3, 3, -1, -1]]
TINY = DraftConfig.tiny()

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("change", alternatives(), ids=label)
def test_unroll_equals_the_step_written_slot_by_slot(change, documents):
    arguments = case(change, MICRO, seed=2, documents=documents)
    got, want = unroll(*arguments), slot_by_slot(*arguments)
    alive = np.ones(want["supervised"].shape[1:], bool) if documents is None else np.array(documents) >= 0
    for k in range(1, arguments[2].num_steps + 1):
        assert_near(got.trace[f"{k}/logits"][alive], want["logits"][k - 1][alive], name=f"logits of step {k}")
        assert_near(got.trace[f"{k}/layer_output"][alive], want["features"][k - 1][alive], name=f"features of step {k}")
    assert_same_bits(got.supervised, want["supervised"])
    assert_near(got.slot_losses[:, alive], want["slot_losses"][:, alive])
    assert_near(got.step_losses, want["step_losses"])
    assert_near(got.total_loss, want["total_loss"])


@every_layout
def test_tiny_unroll_equals_the_step_written_slot_by_slot(layout):
    arguments = case({"draft_input": layout}, TINY, documents=[[0] * 6 + [1] * 4])
    got, want = unroll(*arguments, gradients=False), slot_by_slot(*arguments)
    assert_near(np.stack([got.trace[f"{k}/logits"] for k in range(1, 8)]), want["logits"])
    assert_near(got.total_loss, want["total_loss"])


SOURCES = [
    {},
    {"draft_input": "eagle3"},
    {"token_source": "own", "zero_first_embedding": True},
    {"token_source": "given", "recycled_feature": "post_norm"},
    {"draft_input": "eagle3", "token_source": "given", "recycled_feature": "post_norm", "zero_first_embedding": True},
    {"draft_input": "eagle3", "token_source": "own", "head": "reduced", "feature_norm": "joint"},
    {"routing_weight": "before_down", "quantize_hidden": False, "feature_norm": "per_chunk"},
]
over_sources = pytest.mark.parametrize("change", SOURCES, ids=label)


def fed_tokens(inputs, choices, result, row, anchor) -> np.ndarray:
    """What the anchor's slot reads at steps 1..K: token 0 where its document has ended."""
    steps, slots = len(result.step_losses), inputs["tokens"].shape[1]
    ids, ahead = (inputs["documents"][row], 0) if "documents" in inputs else (np.zeros(slots), 1)
    fed = np.zeros(steps, int)
    for k in range(1, steps + 1):
        last = anchor + k - ahead  # the slot that has to exist, in the same document
        if choices.token_source == "own" and k > 1:
            fed[k - 1] = result.decisions[f"{k}/tokens"][row, anchor]
        elif last < slots and ids[last] == ids[anchor]:
            teacher = inputs["tokens"][row, anchor + k - 1]
            fed[k - 1] = inputs["tokens_by_step"][k - 1, row, anchor] if choices.token_source == "given" else teacher
    return fed


@pytest.mark.parametrize("documents", [None, [[0] * 6 + [1] * 4, [2] * 10]], ids=["one document", "documents"])
@over_sources
def test_unroll_equals_drafting_one_token_after_another_at_every_anchor_and_step(change, documents):
    params, inputs, config, choices = arguments = case(change, TINY, documents=documents, slots=10)
    result = unroll(*arguments, gradients=False)
    ids = np.zeros((2, 10), int) if documents is None else inputs["documents"]
    source = inputs["tokens_by_step"][0] if choices.token_source == "given" else inputs["tokens"]
    for row, anchor in np.ndindex(2, 10):
        prefix = slice(np.flatnonzero(ids[row] == ids[row, anchor])[0], anchor + 1)
        fed = fed_tokens(inputs, choices, result, row, anchor)
        tokens = np.append(source[row, prefix][:-1], fed[0])
        features = {name: inputs[name][row, prefix] for name in ("low", "mid", "high")}
        logits, features = draft_sequence(params, {"tokens": tokens, "given": fed[1:], **features}, config, choices)
        for k in range(1, config.num_steps + 1):
            assert_near(logits[k - 1], result.trace[f"{k}/logits"][row, anchor], name=(row, anchor, k))
            assert_near(features[k - 1], result.trace[f"{k}/layer_output"][row, anchor], name=(row, anchor, k))


def test_drafting_from_a_fused_feature_equals_drafting_from_the_three():
    params, inputs, config, choices = case({}, TINY, rows=1)
    three = {name: inputs[name][0] for name in ("low", "mid", "high")}
    fused = {"feature": np.concatenate(list(three.values()), axis=-1) @ params["fc.weight"].T}
    common = {"tokens": inputs["tokens"][0], "given": np.arange(6)}
    for a, b in zip(draft_sequence(params, common | three, config, choices),
                    draft_sequence(params, common | fused, config, choices), strict=True):  # fmt: skip
        assert_near(a, b)


# Independence


def scrambled(inputs: dict, where: np.ndarray, config, seed=11, mask=None) -> dict:
    """The inputs with other contents in the slots ``where`` [B, T]; ``mask`` there if given, else random."""
    rng, out = np.random.default_rng(seed), {name: np.array(x) for name, x in inputs.items()}
    out["tokens"][where] = rng.integers(0, config.vocab_size, where.sum())
    out["mask"][where] = rng.random(where.sum()) < 0.5 if mask is None else mask
    for name in ("low", "mid", "high", "target_logits"):
        out[name][where] = rng.normal(0, 5, out[name][where].shape)
    if "tokens_by_step" in out:
        out["tokens_by_step"][:, where] = rng.integers(0, config.vocab_size, (config.num_steps, where.sum()))
    return out


def assert_equal_results(got, want, compare=assert_near) -> None:
    """Losses, every recorded value and cotangent, every decision and gradient."""
    for name in ("total_loss", "step_losses", "slot_losses", "supervised"):
        compare(getattr(got, name), getattr(want, name), name=name)
    for table in ("trace", "decisions", "grads"):
        assert set(getattr(got, table)) == set(getattr(want, table))
        for key, x in getattr(want, table).items():
            compare(getattr(got, table)[key], x, name=key)


def values_of(trace: dict) -> dict:
    """Stage values by (step, stage) that have one entry a slot."""
    keys = [(key, key.split("/", 1)) for key in trace if not key.endswith(".grad")]
    return {(int(step), stage): trace[key] for key, (step, stage) in keys if trace[key].ndim}


@pytest.mark.parametrize("cut", [0, 3, 6])
@over_sources
def test_no_output_depends_on_the_future(change, cut):
    """Slot j of step k has seen tokens and targets up to slot j + k - 1 and features up to slot j."""
    params, inputs, config, choices = case(change, MICRO, seed=cut, slots=8)
    future = np.broadcast_to(np.arange(8) > cut, (2, 8))
    a = unroll(params, inputs, config, choices, gradients=False)
    b = unroll(params, scrambled(inputs, future, config), config, choices, gradients=False)
    for (k, stage), x in values_of(a.trace).items():
        past = slice(0, max(cut - k + 2, 0))
        assert_near(values_of(b.trace)[k, stage][:, past], x[:, past], name=(k, stage))
        assert_same_bits(b.supervised[k - 1, :, past], a.supervised[k - 1, :, past])
    assert np.abs(b.trace["1/logits"] - a.trace["1/logits"])[:, cut + 1].min() > 0


@over_sources
def test_no_gradient_depends_on_the_unsupervised_future(change):
    params, inputs, config, choices = case(change, MICRO, slots=8)
    future = np.broadcast_to(np.arange(8) > 4, (2, 8))
    inputs["mask"] &= ~future
    a = unroll(params, inputs, config, choices)
    b = unroll(params, scrambled(inputs, future, config, mask=False), config, choices)
    assert_near(b.total_loss, a.total_loss)
    for table in (a.grads, {key: x for key, x in a.trace.items() if key.endswith(".grad")}):
        assert any(np.abs(x).max() > 0 for x in table.values())
        for key, x in table.items():
            assert_near((b.grads | b.trace)[key], x, name=key)


@over_sources
def test_no_output_depends_on_another_document(change):
    params, inputs, config, choices = case(change, MICRO, documents=DOCUMENTS)
    for document in (0, 1):
        other = inputs["documents"] == document
        a = unroll(params, inputs, config, choices, gradients=False)
        b = unroll(params, scrambled(inputs, other, config), config, choices, gradients=False)
        for key, x in values_of(a.trace).items():
            assert_near(values_of(b.trace)[key][~other], x[~other], name=key)
        assert_same_bits(b.supervised[:, ~other], a.supervised[:, ~other])
        inputs["mask"] = inputs["mask"] & ~other
        a = unroll(params, inputs, config, choices)
        b = unroll(params, scrambled(inputs, other, config, mask=False), config, choices)
        for name, grad in a.grads.items():
            assert_near(b.grads[name], grad, name=name)
        inputs["mask"] = inputs["mask"] | other


WITH_PADDING = [[0, 0, 0, 0, 0, 0, -1, -1], [-1, 5, 5, 5, -1, 2, 2, 2], [-1] * 8]


@pytest.mark.parametrize("poison", [1e30, -1e30, np.nan, np.inf])
@over_sources
def test_padding_contents_change_not_one_bit(change, poison):
    params, inputs, config, choices = case(change, MICRO, documents=WITH_PADDING)
    padding = inputs["documents"] < 0
    clean, poisoned = ({name: np.array(x) for name, x in inputs.items()} for _ in range(2))
    for name in ("low", "mid", "high", "target_logits"):
        clean[name][padding], poisoned[name][padding] = 0.0, poison
    clean["mask"][padding], poisoned["mask"][padding] = False, True
    clean["tokens"][padding], poisoned["tokens"][padding] = 0, -(10**6)
    if "tokens_by_step" in inputs:
        clean["tokens_by_step"][:, padding], poisoned["tokens_by_step"][:, padding] = 0, 10**6
    a, b = unroll(params, clean, config, choices), unroll(params, poisoned, config, choices)
    assert_equal_results(b, a, assert_same_bits)
    assert not b.supervised[:, padding].any()
    assert all(np.isfinite(x).all() for x in (*b.grads.values(), *b.trace.values()))


def test_a_slot_sees_the_earlier_slots_of_its_document_and_padding_sees_and_is_seen_by_nothing_else():
    assert visible(np.array([[4, 4, -1, -1, 2, 2]]))[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


# Additivity


def pieces_of(inputs: dict, pieces: list) -> list[dict]:
    """One set of inputs for each (row, slots)."""
    out = []
    for row, slots in pieces:
        piece = {name: x[row : row + 1, slots] for name, x in inputs.items() if name in PER_SLOT}
        if "tokens_by_step" in inputs:
            piece["tokens_by_step"] = inputs["tokens_by_step"][:, row : row + 1, slots]
        out.append(piece | {name: x for name, x in inputs.items() if name == "draft_to_target"})
    return out


PER_SLOT = ("tokens", "low", "mid", "high", "target_logits", "mask", "documents")


def assert_additive(arguments, pieces) -> None:
    """Losses and gradients are the sums over the pieces, each with the whole batch's counts (spec.md section 5)."""
    params, inputs, config, choices = arguments
    whole = unroll(*arguments)
    total, grads = 0.0, {name: np.zeros_like(grad) for name, grad in whole.grads.items()}
    for piece in pieces_of(inputs, pieces):
        own = unroll(params, piece, config, choices, gradients=False)
        share = own.supervised.sum(axis=(1, 2)) / np.maximum(whole.supervised.sum(axis=(1, 2)), 1)
        if choices.reduction == "all_slots":
            share = np.full(config.num_steps, piece["tokens"].size / inputs["tokens"].size)
        weights = tuple(share * choices.weights(config.num_steps))
        part = unroll(params, piece, config, choices.replace(step_weights=weights))
        total += part.total_loss
        grads = {name: grad + part.grads[name] for name, grad in grads.items()}
    assert_near(total, whole.total_loss)
    for name, grad in whole.grads.items():
        assert_near(grads[name], grad, name=name)


ADDITIVE = [*SOURCES, {"reduction": "all_slots"}, {"step_weights": "decay"}]


@pytest.mark.parametrize("change", ADDITIVE, ids=label)
def test_gradients_of_a_batch_are_the_sums_over_its_rows(change):
    assert_additive(case(change, MICRO, documents=DOCUMENTS), [(0, slice(None)), (1, slice(None))])


@pytest.mark.parametrize("change", ADDITIVE, ids=label)
def test_a_packed_row_equals_its_documents_in_rows_of_their_own(change):
    arguments = case(change, MICRO, documents=[[0, 0, 0, 0, 0, 1, 1, 1]])
    params, inputs, config, choices = arguments
    pieces = [(0, slice(0, 5)), (0, slice(5, 8))]
    assert_additive(arguments, pieces)
    packed = values_of(unroll(*arguments, gradients=False).trace)
    for piece, (_, slots) in zip(pieces_of(inputs, pieces), pieces, strict=True):
        for key, x in values_of(unroll(params, piece, config, choices, gradients=False).trace).items():
            assert_near(packed[key][:, slots], x, name=key)


# The loss, its mask and the frozen side


@every_layout
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_a_step_without_supervised_slots_contributes_exactly_nothing(layout, documents):
    """Only slot 0 is supervised, at step 1: the rest equals a weight of 0, and step 1 keeps its own weight."""
    params, inputs, config, choices = case({"draft_input": layout}, MICRO, documents=documents)
    inputs["mask"][:] = False
    inputs["mask"][0, 0] = True
    result = unroll(params, inputs, config, choices)
    assert result.step_losses[1:].tolist() == [0.0, 0.0]
    assert_near(result.total_loss, result.slot_losses[0, 0, 0] / 3)
    only_first = unroll(params, inputs, config, choices.replace(step_weights=(1 / 3, 0.0, 0.0)))
    for name, grad in result.grads.items():
        assert_same_bits(grad + 0.0, only_first.grads[name] + 0.0, name)
    inputs["mask"][:] = False
    result = unroll(params, inputs, config, choices)
    assert result.total_loss == 0.0
    assert all((grad == 0).all() for grad in (*result.grads.values(), result.trace["1/logits.grad"]))


FROZEN = {
    "mtp": ({}, {"embed_tokens.weight", "shared_head.head.weight", "block_sparse_moe.gate.e_score_correction_bias"}),
    "eagle3": ({"draft_input": "eagle3"}, {"embed_tokens.weight", "shared_head.head.weight"}),
    "own head": ({"draft_input": "eagle3", "head": "own"}, {"embed_tokens.weight"}),
    "reduced head": ({"draft_input": "eagle3", "head": "reduced"}, {"embed_tokens.weight"}),
    "frozen head norm": (
        {"draft_input": "eagle3", "head": "own", "trained": "freeze_head_norm"},
        {"embed_tokens.weight", "shared_head.norm.weight"},
    ),
}


@pytest.mark.parametrize(("change", "frozen"), FROZEN.values(), ids=FROZEN)
def test_frozen_parameters_are_absent_from_the_gradients_and_all_others_are_there(change, frozen):
    params, *rest = case(change, MICRO)
    grads = unroll(params, *rest).grads
    assert set(params) - set(grads) == frozen
    assert all(grads[name].shape == params[name].shape for name in grads)
    assert all(np.abs(grad).max() > 0 for name, grad in grads.items() if ".experts." not in name)


@pytest.mark.parametrize("change", alternatives(), ids=label)
def test_parameters_and_inputs_are_bytewise_unchanged(change):
    params, inputs, config, choices = case(change, MICRO, documents=DOCUMENTS)
    before = {name: (x.tobytes(), x.dtype, x.shape) for name, x in (params | inputs).items()}
    for x in (params | inputs).values():
        x.flags.writeable = False  # a write raises
    result = unroll(params, inputs, config, choices)
    for x in (*result.grads.values(), *result.trace.values()):
        if x.ndim and x.flags.writeable:
            x[...] = 7.0  # results share no memory with what was passed in
    assert {name: (x.tobytes(), x.dtype, x.shape) for name, x in (params | inputs).items()} == before


def test_the_same_call_gives_the_same_bits_and_none_depend_on_asking_for_gradients():
    arguments = case({}, MICRO, documents=DOCUMENTS)
    first, again, plain = unroll(*arguments), unroll(*arguments), unroll(*arguments, gradients=False)
    assert_equal_results(again, first, assert_same_bits)
    assert not plain.grads
    for key, x in plain.trace.items():
        assert_same_bits(x, first.trace[key], key)


def test_forced_experts_are_used_and_their_own_values_change_nothing():
    arguments = case({}, MICRO)
    result = unroll(*arguments)
    pinned = {(k, "experts"): result.decisions[f"{k}/experts"] for k in (1, 2, 3)}
    assert_equal_results(unroll(*arguments, forced=pinned), result, assert_same_bits)
    pinned[2, "experts"] = np.broadcast_to(np.array([2, 0], np.int32), (2, 8, 2))
    other = unroll(*arguments, forced=pinned)
    assert_same_bits(other.trace["1/logits"], result.trace["1/logits"])
    assert (other.decisions["2/experts"] == [2, 0]).all()
    assert (other.trace["2/route"] != result.trace["2/route"]).any()


def test_without_documents_the_last_slot_exists_and_with_them_it_reads_past_the_end():
    """With ``documents`` slot j + k has to exist; without, the aligned arrays say what does (spec.md section 3)."""
    params, inputs, config, choices = case({}, MICRO)
    inputs["mask"][:] = True
    free = unroll(params, inputs, config, choices, gradients=False)
    bounded = unroll(params, inputs | {"documents": np.zeros((2, 8), int)}, config, choices, gradients=False)
    assert free.supervised.sum(axis=2).tolist() == [[8, 8], [7, 7], [6, 6]]
    assert bounded.supervised.sum(axis=2).tolist() == [[7, 7], [6, 6], [5, 5]]
