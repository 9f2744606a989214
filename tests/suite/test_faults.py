"""Ten faults planted in ``fast``, one at a time: each is caught, and the right step and stage are named."""

from contextlib import contextmanager
from unittest import mock

import pytest

from draftconf.conformance.checks import plan as checks
from draftconf.conformance.protocol.environment import environment
from draftconf.conformance.protocol.loading import load
from draftconf.conformance.protocol.subject import Subject
from draftconf.conformance.report import results
from draftconf.conformance.report.text import closing
from draftconf.fast import attention, fusion, moe, mx, unroll

POLICY = "float32"


def first_fault(layout: str) -> dict:
    """Run the walk on ``fast`` as it stands now; the check that the report names first."""
    subject = Subject(load("fast"))
    plan = [c for c in checks.plan(subject.description, policies=[POLICY]) if c.kind == "trace" and c.layout == layout]
    outcomes = {check.id: results.clean(check.run(subject), results.about(check)) for check in plan}
    found = results.build(
        plan=[results.about(check) for check in plan], outcomes=outcomes, selected=set(outcomes),
        subject=subject.about(), adapter="fast", seed=0, env=environment(),
        selection={"stage": None, "policy": None, "pyargs": False},
    )  # fmt: skip
    assert found["first_fault"], "the fault was not caught"
    check = next(c for c in found["checks"] if c["id"] == found["first_fault"]["id"])
    return check | {"sentence": closing(found)}


@contextmanager
def replaced(module, name: str, make):
    """``module.name`` as ``make`` makes it from the original."""
    with mock.patch.object(module, name, make(getattr(module, name))):
        yield


def wrong_feature_order(original):
    return lambda low, mid, high, *rest: original(mid, low, high, *rest)


def own_keys_missing_at_step_3(original):
    cut = lambda x: x[:1] if len(x) == 3 else x  # noqa: E731
    return lambda query, keys, values, documents=None: original(query, cut(keys), cut(values), documents)


def gate_reads_another_slot(original):
    return lambda x, output, params, record: original(x.roll(1, 1), output, params, record)


def bias_in_the_routing_weights(original):
    def route(scores, bias, config, choices, experts=None):
        _, chosen = original(scores, bias, config, choices, experts)
        return original(scores + bias, bias, config, choices, chosen)

    return route


def ceil_scales(original):
    return lambda x, form, rule, *rest: original(x, form, "ceil", *rest)


def straight_through_zeroed(original):
    return lambda hidden, *rest: original(hidden.detach() + 0 * hidden, *rest)


def step_weights_decay(original):
    decay = [0.8**k for k in range(7)]
    return lambda losses, supervised, weights, *rest: original(losses, supervised, decay, *rest)


def mask_not_shifted(original):
    def step_inputs(inputs, k, choices):
        tokens, target, _ = original(inputs, k, choices)
        return tokens, target, original(inputs, 1, choices)[2]

    return step_inputs


def feature_detached(original):
    return lambda *arguments: original(*arguments).detach()


def epsilon_1e_6(original):
    return lambda x, weight, eps: original(x, weight, 1e-6)


FAULTS = [
    (unroll, "fusion", wrong_feature_order, "eagle3", 1, "fusion"),
    (attention, "attention", own_keys_missing_at_step_3, "mtp", 3, "attention"),
    (attention, "attn_gate", gate_reads_another_slot, "eagle3", 1, "attn_gate.pre"),
    (moe, "route", bias_in_the_routing_weights, "mtp", 1, "route"),
    (moe, "fake_quantize", ceil_scales, "mtp", 1, "mx_input"),
    (moe, "mx_hidden", straight_through_zeroed, "mtp", 7, "mx_hidden"),
    (unroll, "total_loss", step_weights_decay, "eagle3", None, "total_loss"),
    (unroll, "step_inputs", mask_not_shifted, "eagle3", 2, "lk_loss"),
    (unroll, "recycle", feature_detached, "mtp", 7, "draft_input.hnorm"),
    (fusion, "rms_norm", epsilon_1e_6, "eagle3", 1, "draft_input.enorm"),
]


@pytest.mark.parametrize(
    ("module", "name", "fault", "layout", "step", "stage"), FAULTS, ids=[f[2].__name__ for f in FAULTS]
)
def test_a_planted_fault_is_caught_and_named(module, name, fault, layout, step, stage):
    with replaced(module, name, fault):
        found = first_fault(layout)
    assert (found["first_step"], found["extra"]["blamed"]) == (step, stage)
    assert (f"step {step}, stage {stage}" if step else f"First fault: stage {stage}") in found["sentence"]
    assert "Repeat: pytest" in found["sentence"]


def test_without_a_fault_nothing_is_named():
    assert mx.quantize  # fast as it is
    with pytest.raises(AssertionError, match="not caught"):
        first_fault("eagle3")
