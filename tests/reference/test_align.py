"""``align``: from raw positions to slots, and what the slots read afterwards (spec.md section 3)."""

import numpy as np
import pytest
from helpers import LAYOUTS, MICRO, assert_near, assert_same_bits, case
from hypothesis import given
from hypothesis import strategies as st

from draftconf.reference.config import ALTERNATIVES, Choices, DraftConfig
from draftconf.reference.ops import log_softmax
from draftconf.reference.unroll import align, step_inputs, unroll

MASKS = ALTERNATIVES["mask_alignment"]

#: spec.md section 3: N = 4, K = 3, m = [0, 0, 1, 1]; the target that each slot is supervised with, step by step.
WORKED_EXAMPLE = {
    "position": [[None, 2, 3, None], [2, 3, None, None], [3, None, None, None]],
    "token": [[1, 2, None, None], [2, None, None, None], [None] * 4],
    "slot": [[None, None, 3, None], [None, 3, None, None], [3, None, None, None]],
}


def raw_sequence(length, mask, documents=None, seed=0, config=MICRO) -> dict:
    """Tokens are never 0 and no row of logits is zero, so that fill shows."""
    rng = np.random.default_rng(seed)
    raw = {
        "tokens": rng.integers(1, config.vocab_size, length),
        **{name: rng.normal(0, 1, (length, config.hidden_size)) for name in ("low", "mid", "high")},
        "target_logits": rng.normal(0, 2, (length, config.vocab_size)),
        "mask": np.array(mask, bool),
    }
    return raw if documents is None else raw | {"documents": np.array(documents, np.int32)}


def with_steps(steps: int) -> DraftConfig:
    return DraftConfig(**{**MICRO.to_dict(), "num_steps": steps})


def one_row(slots: dict) -> dict:
    return {name: x[None] for name, x in slots.items() if name != "supervised"}


def supervised_targets(raw, config, choices) -> list:
    """Which P_i each slot is compared with at each step, read off the arrays that the loss reads."""
    slots = align(raw, config, choices)
    values = step_inputs(one_row(slots), config, choices)
    found = []
    for k in range(1, config.num_steps + 1):
        rows = [
            next(i for i, p in enumerate(raw["target_logits"]) if np.array_equal(p, target)) if on else None
            for target, on in zip(values[k, "target_logits"][0], values[k, "supervised"][0], strict=True)
        ]
        assert_same_bits(values[k, "supervised"][0], slots["supervised"][k - 1])
        found.append(rows)
    return found


@pytest.mark.parametrize("documents", [None, [0, 0, 0, 0]], ids=["no documents", "one document"])
@pytest.mark.parametrize("mask_alignment", MASKS)
def test_the_worked_example_of_the_specification(mask_alignment, documents):
    raw = raw_sequence(4, [0, 0, 1, 1], documents)
    choices = Choices(mask_alignment=mask_alignment)
    assert supervised_targets(raw, with_steps(3), choices) == WORKED_EXAMPLE[mask_alignment]


@pytest.mark.parametrize("mask_alignment", MASKS)
def test_with_fixed_targets_the_masks_stay_and_every_slot_keeps_its_first_target(mask_alignment):
    choices = Choices(mask_alignment=mask_alignment, target_alignment="fixed")
    want = [[None if i is None else j + 1 for j, i in enumerate(row)] for row in WORKED_EXAMPLE[mask_alignment]]
    assert supervised_targets(raw_sequence(4, [0, 0, 1, 1]), with_steps(3), choices) == want


def test_slots_hold_the_next_token_the_own_features_and_the_next_target():
    raw = raw_sequence(5, [1, 1, 1, 1, 1])
    slots = align(raw, MICRO, Choices())
    assert slots["tokens"].tolist() == [*raw["tokens"][1:], 0]
    assert_same_bits(slots["target_logits"], np.concatenate([raw["target_logits"][1:], np.zeros((1, 11))]))
    for name in ("low", "mid", "high"):
        assert_same_bits(slots[name], raw[name])
    assert slots["mask"].tolist() == [True, True, True, True, False]
    assert_same_bits(slots["mask"], slots["supervised"][0])
    assert "documents" not in slots
    assert_same_bits(
        align(raw_sequence(2, [1, 1], [4, -1]), MICRO, Choices())["documents"], np.array([4, -1], np.int32)
    )


def allowed(raw, j, k, mask_alignment) -> bool:
    """The rule of spec.md section 3 for one slot and one step."""
    m, length = raw["mask"], len(raw["mask"])
    documents = raw.get("documents", np.zeros(length))
    if j + k >= length or documents[j + k] != documents[j] or documents[j] < 0:
        return False
    at = {"position": j + k, "token": j + k + 1, "slot": j + k - 1}[mask_alignment]
    return bool(at < length and m[at])


@st.composite
def sequences(draw):
    lengths = draw(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4))
    ids = [(-1 if padding else i, length) for i, (length, padding) in enumerate(lengths)]
    documents = [document for document, length in ids for _ in range(length)]
    mask = draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    return raw_sequence(len(mask), mask, draw(st.sampled_from([documents, None])), draw(st.integers(0, 99)))


@given(raw=sequences(), steps=st.integers(1, 8), mask_alignment=st.sampled_from(MASKS))
def test_no_supervised_slot_ever_reads_a_fill_or_another_document(raw, steps, mask_alignment):
    config, choices = with_steps(steps), Choices(mask_alignment=mask_alignment)
    slots = align(raw, config, choices)
    values = step_inputs(one_row(slots), config, choices)
    documents = raw.get("documents", np.zeros(len(raw["mask"])))
    for k, j in np.ndindex(steps, len(raw["mask"])):
        k += 1
        want = allowed(raw, j, k, mask_alignment)
        assert slots["supervised"][k - 1, j] == want
        assert values[k, "supervised"][0, j] == want
        if want:
            assert documents[j + k] == documents[j]
            assert values[k, "tokens"][0, j] == raw["tokens"][j + k] > 0
            assert_same_bits(values[k, "target_logits"][0, j], raw["target_logits"][j + k])


@given(raw=sequences(), steps=st.integers(1, 8))
def test_slots_read_fill_exactly_where_their_document_has_ended(raw, steps):
    values = step_inputs(one_row(align(raw, with_steps(steps), Choices())), with_steps(steps), Choices())
    documents = raw.get("documents", np.zeros(len(raw["mask"])))
    for k, j in np.ndindex(steps, len(raw["mask"])):
        k += 1
        inside = j + k < len(documents) and documents[j + k] == documents[j] and documents[j] >= 0
        assert values[k, "tokens"][0, j] == (raw["tokens"][j + k] if inside else 0)
        assert (values[k, "target_logits"][0, j] != 0).any() == inside


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask_alignment", MASKS)
def test_one_sequence_through_align_and_unroll(layout, mask_alignment):
    """The loss of every supervised slot is that between its logits and P_{j+k}; the step losses are their means."""
    params, _, config, choices = case({"draft_input": layout, "mask_alignment": mask_alignment}, MICRO)
    raw = raw_sequence(9, [1, 1, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 2, 2, 2, 2])
    slots = align(raw, config, choices)
    result = unroll(params, one_row(slots), config, choices)
    assert_same_bits(result.supervised[:, 0], slots["supervised"])
    total = 0.0
    for k in range(1, 4):
        losses = []
        for j in np.flatnonzero(slots["supervised"][k - 1]):
            log_q, log_p = (log_softmax(x) for x in (result.trace[f"{k}/logits"][0, j], raw["target_logits"][j + k]))
            losses.append(-np.log(np.exp(np.minimum(log_p, log_q)).sum()))
            assert_same_bits(result.trace[f"{k}/embed"][0, j], params["embed_tokens.weight"][raw["tokens"][j + k]])
        total += np.mean(losses) / 3 if losses else 0.0
    assert_near(result.total_loss, total)


@pytest.mark.parametrize("reduced_target", ALTERNATIVES["reduced_target"])
def test_a_reduced_head_compares_each_draft_id_with_its_target_id(reduced_target):
    params, inputs, config, choices = case({"head": "reduced", "reduced_target": reduced_target}, MICRO)
    ids = inputs["draft_to_target"]
    raw = raw_sequence(6, [1] * 6)
    result = unroll(params, one_row(align(raw, config, choices)) | {"draft_to_target": ids}, config, choices)
    for k in (1, 2, 3):
        for j in range(6 - k):
            p = np.exp(log_softmax(raw["target_logits"][j + k]))
            q = np.exp(log_softmax(result.trace[f"{k}/logits"][0, j]))
            normaliser = 1.0 if reduced_target == "restricted" else p[ids].sum()
            alpha = sum(min(p[target] / normaliser, q[draft]) for draft, target in enumerate(ids))
            assert_near(result.slot_losses[k - 1, 0, j], -np.log(alpha))
