"""The operands of a failing element: from them alone its expected value can be computed again."""

import json

import numpy as np
import pytest

from draftconf.conformance.adapters.reference import Reference
from draftconf.conformance.checks import plan as checks
from draftconf.conformance.judging import operands
from draftconf.conformance.protocol.environment import environment
from draftconf.conformance.protocol.subject import Subject
from draftconf.conformance.report import results
from draftconf.conformance.report.html.page import html
from draftconf.conformance.report.markdown import markdown
from draftconf.reference import mx
from draftconf.reference.config import DraftConfig, kind_of


class Tampered(Reference):
    """The oracle, with one entry of one array that it returns changed by a hundredth (integers by one)."""

    def __init__(self, method: str, part: str, name: str, index: tuple):
        self.method, self.part, self.name, self.index = method, part, name, index

    def describe(self) -> dict:
        return super().describe() | {"layouts": ["mtp"]}

    def __getattribute__(self, attribute: str):
        found = super().__getattribute__(attribute)
        return self.changed(found) if attribute != "method" and attribute == self.method else found

    def changed(self, method):
        def call(inputs, **options):
            returned = method(inputs, **options)
            parts = list(returned) if isinstance(returned, tuple) else [returned, {}, {}, {}]
            where = ("outputs", "grads", "decisions", "trace").index(self.part)
            array = np.array(parts[where][self.name])
            if array.shape[0] > self.index[0]:  # not so where the suite tries a smaller input
                array[self.index] += 1 if array.dtype.kind in "iu" else 0.01 * array[self.index]
            parts[where] = {**parts[where], self.name: array}
            return tuple(parts)

        return call


def element(check_id: str, part: str, name: str, index: tuple, method: str = "") -> dict:
    """The worst element of a check on the tampered oracle."""
    stage = check_id.partition(".")[0]
    subject = Subject(Tampered(method or stage, part, name, index))
    check = next(c for c in checks.plan(subject.description) if c.id == check_id)
    outcome = results.clean(check.run(subject), results.about(check))
    assert outcome["verdict"] == "fail", outcome
    return outcome["worst"]


def numbers(found: dict) -> dict[str, np.ndarray]:
    read = lambda text: float.fromhex(text) if operands.is_hexadecimal(text) else int(text)  # noqa: E731
    return {each["name"]: np.array([read(value) for value in each["values"]]) for each in found["operands"]}


def agrees(found: dict, value: float) -> None:
    """``value`` is the expected one, up to the roundings of this computation of it."""
    assert value == pytest.approx(float.fromhex(found["expected_hex"]), rel=1e-12)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_a_linear_stage_in_the_walk_is_the_product_of_its_operands():
    found = element("logits.value.trace[mtp-float64-tame]", "trace", "3/logits", (1, 4, 7), "unroll")
    assert (found["step"], found["index"]) == (3, [1, 4, 7])
    x, w = numbers(found)["3/head_norm"], numbers(found)["shared_head.head.weight"]
    assert x.shape == w.shape == (DraftConfig.tiny().hidden_size,)
    agrees(found, x @ w)
    assert found["operands"][0]["row"] == [1, 4]
    assert found["operands"][1]["row"] == [7]


def test_an_elementwise_stage_in_the_walk_has_one_entry_of_each_operand():
    found = element("attn_gate.value.trace[mtp-float64-tame]", "trace", "2/attn_gate", (0, 3, 11), "unroll")
    given = {each["name"]: each for each in found["operands"]}
    assert all(each["row"] == [0, 3, 11] and each["at"] == [] and each["of"] == 1 for each in given.values())
    gate = numbers(found)["2/attn_gate.pre"]
    agrees(found, float((sigmoid(gate) * numbers(found)["2/attention"])[0]))


def test_a_cotangent_is_the_sum_of_its_contributions():
    found = element(
        "layer_output.cotangent.trace[mtp-float64-tame]", "trace", "2/layer_output.grad", (0, 2, 5), "unroll"
    )
    assert found["step"] == 2
    parts = numbers(found)
    assert all(name.startswith("contribution of ") for name in parts)
    assert len(parts) == 2  # the head of its step, and the next step
    agrees(found, float(sum(value[0] for value in parts.values())))


@pytest.mark.parametrize("name", ["eh_proj.weight", "block_sparse_moe.experts.2.w1.weight"])
def test_a_parameters_gradient_is_the_sum_over_the_steps(name):
    kind = kind_of(name)
    found = element(f"{kind}.gradient.trace[mtp-float64-tame]", "grads", name, (4, 9), "unroll")
    assert found["index"] == [4, 9]
    agrees(found, sum(float(value[0]) for value in numbers(found).values()))
    assert len(found["operands"]) == 7


def test_a_block_of_mx_input_in_the_walk():
    found = element("mx_input.value.trace[mtp-float64-tame]", "trace", "1/mx_input", (0, 3, 40), "unroll")
    x, scale = numbers(found)["x"], numbers(found)["scale byte"]
    assert x.shape == (32,)
    scales, codes = mx.quantize(x[None], "mxfp8_e4m3", "floor")
    assert scales[0, 0] == scale[0]
    agrees(found, float(mx.dequantize(scales, codes, "mxfp8_e4m3")[0, 40 - 32]))


def test_a_stage_by_itself_gives_the_inputs_of_the_element():
    found = element("situ_glu.y.stage[mtp-float64-tame]", "outputs", "y", (1, 2, 3))
    gate, up = (numbers(found)[name][0] for name in ("gate", "up"))
    config = DraftConfig.tiny()
    b1, b2 = config.activation_situ_beta, config.activation_situ_linear_beta
    agrees(found, b1 * np.tanh(gate / b1) * sigmoid(gate) * b2 * np.tanh(up / b2))


def test_a_gradient_of_a_stage_by_itself_is_a_sum():
    found = element("situ_glu.d_up.stage[mtp-float64-tame]", "grads", "up", (1, 2, 3))
    agrees(found, sum(float(value[0]) for value in numbers(found).values()))


def test_a_row_of_logits_is_cut_to_the_decisive_entries():
    found = element("lk_loss.loss.stage[mtp-float64-tame]", "outputs", "loss", (1,))
    given = {each["name"]: each for each in found["operands"]}
    assert set(given) == {"draft_logits", "target_logits"}
    assert given["draft_logits"]["at"] == given["target_logits"]["at"]
    for each in given.values():
        assert len(each["values"]) == operands.FEW // 2 < each["of"]
        assert each["row"] == [1]


def test_a_step_loss_end_to_end_is_the_mean_of_its_slots():
    found = element("unroll.step_losses.end[mtp-float64-tame]", "outputs", "step_losses", (2,), "unroll")
    losses = numbers(found)["3/lk_loss"]
    agrees(found, losses.mean())


def test_a_slot_loss_end_to_end_comes_from_its_logits():
    found = element("unroll.slot_losses.end[mtp-float64-tame]", "outputs", "slot_losses", (2, 0, 2), "unroll")
    assert {each["name"] for each in found["operands"]} == {"3/logits", "3/target_log_probs"}
    assert all(each["row"] == [0, 2] for each in found["operands"])


@pytest.mark.parametrize("name", ["eh_proj.weight", "block_sparse_moe.experts.2.w1.weight"])
def test_a_gradient_end_to_end_is_the_sum_over_the_steps(name):
    kind = kind_of(name)
    found = element(f"unroll.d_{kind}.end[mtp-float64-tame]", "grads", name, (4, 9), "unroll")
    agrees(found, sum(float(value[0]) for value in numbers(found).values()))
    assert len(found["operands"]) == 7


@pytest.mark.parametrize(
    ("check_id", "name", "index", "method"),
    [
        ("experts.decision.trace[mtp-float64-tame]", "3/experts", (1, 2), "unroll"),
        ("route.experts.stage[mtp-float64-tame]", "experts", (0, 3), "route"),
    ],
)
def test_an_illegal_expert_set_shows_its_scores(check_id, name, index, method):
    """The last of the chosen replaced by the one with the least score + bias."""

    class Swapped(Tampered):
        def changed(self, method):
            def call(inputs, **options):
                outputs, grads, decisions, *trace = method(inputs, **options)
                ids = np.array(decisions[name])
                left_out = np.setdiff1d(np.arange(DraftConfig.tiny().num_experts), ids[index])
                ids[index][-1] = left_out[0]
                return (outputs, grads, {**decisions, name: ids}, *trace)

            return call

    subject = Subject(Swapped(method, "", "", ()))
    check = next(c for c in checks.plan(subject.description) if c.id == check_id)
    outcome = results.clean(check.run(subject), results.about(check))
    assert outcome["verdict"] == "fail"
    found, given = outcome["worst"], numbers(outcome["worst"])
    chosen = given["experts"].tolist()
    scores = given["score + bias"]
    rest = [e for e in range(len(scores)) if e not in chosen]
    assert float.fromhex(found["actual_hex"]) == scores[chosen].min()
    assert float.fromhex(found["expected_hex"]) == scores[rest].max() > scores[chosen].min()
    assert (
        f"slot {list(index)} has expert {chosen[int(np.argmin(scores[chosen]))]} with score + bias"
        in outcome["message"]
    )
    assert found["index"] == list(index)
    assert outcome["ratio"] > 1


def test_an_expert_named_twice_is_told_in_words():
    found = Subject(Tampered("route", "decisions", "experts", (0, 3)))
    check = next(c for c in checks.plan(found.description) if c.id == "route.experts.stage[mtp-float64-tame]")
    outcome = check.run(found)  # every id of the slot one higher: the same number of them, or one out of range
    assert outcome["verdict"] == "fail"
    assert "slot [0, 3] has" in outcome["message"]


class Doubled(Reference):
    """The loss and its gradient twice too large."""

    def lk_loss(self, inputs, **options):
        outputs, grads, decisions = super().lk_loss(inputs, **options)
        double = lambda arrays: {name: 2 * array for name, array in arrays.items()}  # noqa: E731
        return double(outputs), double(grads), decisions


def test_the_search_for_a_smaller_input_leaves_the_addends_alone():
    subject = Subject(Doubled())
    plan = [c for c in checks.plan(subject.description, stages=["lk_loss"]) if c.id.endswith("[mtp-float64-tame]")]
    found = {c.quantity: c.run(subject) for c in plan if c.kind == "stage"}
    assert "smallest input" in found["loss"]["message"]
    assert found["d_draft_logits"]["verdict"] == "fail"
    agrees(
        found["d_draft_logits"]["worst"], float(sum(v[0] for v in numbers(found["d_draft_logits"]["worst"]).values()))
    )


@pytest.mark.parametrize(("what", "index"), [("codes", (5, 17)), ("scales", (5, 0))])
def test_a_code_or_scale_has_its_block(what, index):
    found = element(f"mxfp4.{what}.exact[mtp-float64-normal]", "outputs", what, index)
    scales, codes = mx.quantize(numbers(found)["x"][None], "mxfp4", "floor")
    assert numbers(found)["scale byte"][0] == scales[0, 0]
    agrees(found, float((codes if what == "codes" else scales)[0, index[1]]))


def test_a_decoded_value_has_its_code_and_scale():
    found = element("mxfp8_decode.values.exact[mtp-float64-all_codes]", "outputs", "values", (130, 44))
    assert {name: value.tolist() for name, value in numbers(found).items()} == {"codes": [44], "scales": [130]}


def test_a_mistake_in_listing_operands_changes_no_verdict():
    (said,) = operands.listed(lambda: [][1])
    assert said["name"] == "not listed (IndexError: list index out of range)"
    assert operands.lines(said) == []


def test_bits_are_those_of_the_format():
    assert [operands.bits(1.0, form) for form in ("float64", "float32", "bfloat16", "float16")] == [
        "0x3ff0000000000000", "0x3f800000", "0x3f80", "0x3c00",
    ]  # fmt: skip
    assert operands.bits(-0.0, "bfloat16") == "0x8000"
    assert operands.bits(1.0 + 2.0**-9, "bfloat16") == "0x3f80"  # rounded to nearest
    assert operands.bits(float("inf"), "float16") == "0x7c00"
    assert operands.bits(float("nan"), "float32")[:5] in ("0x7fc", "0xffc")
    assert operands.bits(1.0, "") == ""


def whole(count: int) -> dict:
    """Results in which the first checks fail at the same planted element."""
    subject = Subject(Tampered("unroll", "trace", "3/logits", (1, 4, 7)))
    plan = [c for c in checks.plan(subject.description) if c.kind == "trace" and c.case == "tame"]
    failing = next(c for c in plan if c.id.startswith("logits.value"))
    outcome = results.clean(failing.run(subject), results.about(failing))
    return results.build(
        plan=[results.about(c) for c in plan], outcomes={c.id: json.loads(json.dumps(outcome)) for c in plan[:count]},
        selected={c.id for c in plan}, subject=subject.about(), adapter="fast", seed=0, env=environment(),
        selection={"stage": None, "policy": None, "pyargs": False},
    )  # fmt: skip


def test_the_reports_show_the_operands_and_stay_small():
    found = whole(results.KEPT + 5)
    kept = [c for c in found["checks"] if (c["worst"] or {}).get("operands")]
    assert len(kept) == results.KEPT
    assert kept[0]["id"] == found["first_fault"]["id"]
    assert len(json.dumps(found)) < 1e6
    page, text = html(found), markdown(found)
    assert len(page.encode()) < 2 * 1024 * 1024
    value = kept[0]["worst"]["operands"][0]["values"][3]
    assert page.count('<details class="operands">') == results.KEPT
    assert f"<td>{value}</td>" in page
    assert text.count("| operand | index |") == 1
    assert f"| {value} |" in text
