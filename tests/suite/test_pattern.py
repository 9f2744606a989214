"""The checks of ``pattern``: faults planted in ``fast`` are caught and named, honest code passes."""

import os
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
import torch

from draftconf.conformance.checks import pattern as check_pattern
from draftconf.conformance.checks import pattern_losses as check_pattern_losses
from draftconf.conformance.checks import plan as checks
from draftconf.conformance.evidence import nulls
from draftconf.conformance.evidence.mutants.core import around, backward, everywhere
from draftconf.conformance.evidence.mutants.precision import stochastic_stores
from draftconf.conformance.evidence.power import subject_for
from draftconf.conformance.evidence.twins import TWINS
from draftconf.conformance.protocol.description import Description
from draftconf.conformance.protocol.loading import load
from draftconf.conformance.protocol.pattern import Pattern
from draftconf.conformance.protocol.result import Result
from draftconf.conformance.protocol.subject import Subject
from draftconf.fast import attention, unroll
from draftconf.fast.unroll import shift


def outcomes(policy: str = "float32", choices=None, seed: int = 0, only=None) -> dict:
    """By quantity, the outcome of every check of ``pattern`` on ``fast`` as it stands now."""
    subject = subject_for("eagle3", policy, choices)
    plan = [c for c in checks.plan(subject.description, seed=seed) if c.stage == "pattern"]
    return {check.quantity: check.run(subject) for check in plan if only is None or check.quantity in only}


def read(change):
    """``change(tokens, target, mask, inputs, k)`` of what step k reads."""
    return around(unroll, "step_inputs", lambda o, inputs, k, choices: change(*o(inputs, k, choices), inputs, k))


def keys(change):
    """``change(x)`` of the list of keys and that of values before attention."""
    return around(attention, "attention", lambda o, q, ks, vs, documents=None: o(q, change(ks), change(vs), documents))


def summed(change):
    return around(
        unroll, "total_loss", lambda o, losses, supervised, weights, *rest: change(losses, supervised, weights)
    )


def at_step(k: int, changed, plain):
    return changed if k == 3 else plain


def features_of_the_target_again():
    kept = []

    def keep(original, *arguments):
        kept.append(original(*arguments))
        return kept[-1]

    stack = around(unroll, "recycle", lambda original, feature, normed, choices: kept[-1])
    first = around(unroll, "fusion", keep)
    return both(stack, first)


def both(*contexts):
    from draftconf.conformance.evidence.mutants.core import both as together

    return together(*contexts)


def nan_where_nothing_is_supervised(losses, supervised, weights):
    steps = torch.where(supervised, losses, 0).sum((1, 2)) / supervised.sum((1, 2))
    return (steps * steps.new_tensor(weights)).sum(), steps


def mask_ignored(losses, supervised, weights):
    steps = losses.mean((1, 2))
    return (steps * steps.new_tensor(weights)).sum(), steps


def decayed(losses, supervised, weights):
    steps = torch.where(supervised, losses, 0).sum((1, 2)) / supervised.sum((1, 2)).clamp(min=1)
    return (steps * 0.8 ** torch.arange(1, 8)).sum(), steps


def step_1_keys_cut_back(x):
    """One slot fewer at every further step: slot j of step k sees the slots up to j - k + 1."""
    if len(x) == 1:
        return x
    return [torch.cat([x[0][:, :1].expand(-1, len(x) - 1, -1, -1), x[0][:, : 1 - len(x)]], 1), *x[1:]]


#: name: fault, the check that must fail, the step that must be named, words of its message.
FAULTS = {
    "tokens not shifted": (
        lambda: read(lambda tokens, target, mask, inputs, k: (inputs["tokens"], target, mask)),
        "tokens", 2, "does not read the tokens of slot 1; it must"),
    "token of the next step": (
        lambda: read(lambda t, target, mask, inputs, k: (at_step(k, shift(t, 1, 0), t), target, mask)),
        "tokens", 3, "does not read the tokens of slot 2; it must"),
    "key of the next slot": (
        lambda: keys(lambda x: [x[0].roll(-1, 1), *x[1:]]),
        "tokens", 1, "reads the tokens of slot 1, which it must not"),
    "feature of the next slot": (
        lambda: around(unroll, "fusion", lambda o, *a: o(*a).roll(-1, 1)), "features", 1, "reads the features of slot"),
    "feature of another row": (
        lambda: around(unroll, "fusion", lambda o, *a: o(*a) + 0.1 * o(*a).mean(0, keepdim=True)),
        "features", 1, "of row"),
    "mid left out": (
        lambda: around(unroll, "fusion", lambda o, low, mid, high, *a: o(low, 0 * mid, high, *a)),
        "fusion", 1, "does not read mid"),
    "step-1 key of the own slot missing": (
        lambda: keys(lambda x: [torch.cat([x[0][:, :1], x[0][:, :-1]], 1), *x[1:]]), "cache", 2, "attends no key"),
    "key of step 2 missing at step 3": (
        lambda: keys(lambda x: [x[0], *x[2:]] if len(x) == 3 else x), "cache", 3,
        "attends no key that holds the token of slot 1, as the slot's own key of step 2 does"),
    "own key of the step missing": (
        lambda: keys(lambda x: x[:-1] if len(x) > 1 else x), "cache", 2,
        "does not attend the slot's own key of step 2"),
    "step-1 keys cut back": (lambda: keys(step_1_keys_cut_back), "cache", 2, "as the step-1 key of slot 1 does"),
    "target features read again": (
        features_of_the_target_again, "recycle", 2, "it reads what step 1 read, not the output of step 1"),
    "target shifted once too often at step 3": (
        lambda: read(lambda t, target, mask, inputs, k: (t, at_step(k, shift(target, 1, 0), target), mask)),
        "step_losses", 3, "the target shifted by 3; wanted 2"),
    "target not shifted": (
        lambda: read(lambda t, target, mask, inputs, k: (t, inputs["target_logits"], mask)),
        "step_losses", 2, "the target shifted by 0; wanted 1"),
    "mask not shifted": (
        lambda: read(lambda t, target, mask, inputs, k: (t, target, inputs["mask"])),
        "step_losses", 2, "the mask shifted by 0; wanted 1"),
    "mask one step late": (
        lambda: read(lambda t, target, mask, inputs, k: (t, target, shift(inputs["mask"], max(k - 2, 0), False))),
        "step_losses", 2, "the mask shifted by 0; wanted 1"),
    "mask ignored": (lambda: summed(mask_ignored), "mask", 1, "targets at slots that the mask leaves out"),
    "no supervised slot is NaN": (
        lambda: summed(nan_where_nothing_is_supervised), "empty_steps", None, "is not finite"),
    "weights 0.8^k": (lambda: summed(decayed), "total_loss", None, "it is right for weights 0.8^k"),
    "recycled feature detached": (
        lambda: around(unroll, "recycle", lambda o, *a: o(*a).detach()), "d_features", None, "between the steps"),
    "earlier keys detached": (
        lambda: keys(lambda x: [*(one.detach() for one in x[:-1]), x[-1]]), "d_features", None, "between the steps"),
    "gradient of step 1 only": (
        lambda: around(unroll, "total_loss", lambda o, losses, *a: o(
            torch.cat([losses[:1], losses[1:].detach()]), *a)),
        "d_features", None, "the share of steps 2 to 7 is missing"),
    "gradient without step 4": (
        lambda: around(unroll, "total_loss", lambda o, losses, *a: o(
            torch.cat([losses[:3], losses[3:4].detach(), losses[4:]]), *a)),
        "d_features", None, "the share of step 4 is missing"),
    "gradient a tenth too large": (
        lambda: around(unroll, "fusion", lambda o, *a: backward(o(*a), lambda d: 1.1 * d)),
        "d_features", None, "doubled"),
    "no gradient": (
        lambda: around(unroll, "fusion", lambda o, *a: backward(o(*a), lambda d: 0 * d)),
        "d_features", None, "no gradient arrives"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_named(name):
    change, quantity, step, words = FAULTS[name]
    with change():
        found = outcomes(only=[quantity])[quantity]
    assert found["verdict"] == "fail", found
    assert found["first_step"] == step, found
    assert words in found["message"], found


def test_another_loss_than_declared_is_recognised():
    def kl(original, draft, target, *_):
        log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    with around(unroll, "lk_loss", kl):
        found = outcomes(only=["step_losses"])["step_losses"]
    assert found["verdict"] == "fail"
    assert "the loss kl; declared is lk" in found["message"]


@pytest.mark.parametrize("choices", [{"reduction": "all_slots"}], ids=["all_slots"])
def test_the_declared_denominator_is_the_one_that_is_judged(choices):
    assert outcomes(choices=choices, only=["step_losses"])["step_losses"]["verdict"] == "pass"
    with around(unroll, "total_loss", lambda o, losses, supervised, weights, reduction, *a: o(
            losses, supervised, weights, "supervised", *a)):  # fmt: skip
        found = outcomes(choices=choices, only=["step_losses"])["step_losses"]
    assert "the denominator supervised; declared is all_slots" in found["message"]


def test_post_norm_recycling_is_no_fault_but_hides_the_keys():
    found = outcomes(choices={"recycled_feature": "post_norm"}, only=["tokens", "features", "recycle", "cache"])
    assert [found[name]["verdict"] for name in ("tokens", "features", "recycle")] == ["pass"] * 3
    assert found["cache"]["verdict"] == "undecided"
    assert "does not add to the feature of the step before" in found["cache"]["message"]


@pytest.mark.parametrize("policy", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_twin_passes(policy, seed):
    found = outcomes(policy, seed=seed)
    assert {name: o["message"] for name, o in found.items() if o["verdict"] not in ("pass", "undecided")} == {}
    if policy != "bfloat16":
        assert {o["verdict"] for o in found.values()} == {"pass"}


def stochastic(seed: int, only, change=nullcontext) -> dict:
    """Of products that are rounded at random, declared so: no two runs are alike."""
    subject = subject_for("eagle3", "bfloat16", None, {"rounding": "stochastic"})
    plan = [c for c in checks.plan(subject.description, seed=seed) if c.stage == "pattern" and c.quantity in only]
    with everywhere("linear", stochastic_stores), change():
        return {check.quantity: check.run(subject) for check in plan}


@pytest.mark.parametrize("seed", [0, 11, 13, 17, 28])
def test_runs_that_differ_are_no_fault_and_hide_none(seed):
    found = stochastic(seed, ["tokens", "features", "fusion", "mask", "step_losses", "empty_steps"])
    assert {name: o["message"] for name, o in found.items() if o["verdict"] not in ("pass", "undecided")} == {}
    assert stochastic(seed, ["mask"], lambda: summed(mask_ignored))["mask"]["verdict"] == "fail"
    ahead, *_ = FAULTS["key of the next slot"]
    assert stochastic(seed, ["tokens"], ahead)["tokens"]["verdict"] == "fail"


HONEST = [twin for twin in TWINS if twin.change is not nullcontext and twin.trace is dict][::6]


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
@pytest.mark.parametrize("twin", HONEST, ids=[twin.name for twin in HONEST])
def test_honest_twins_pass(twin, policy):
    with twin.change():
        found = outcomes(policy, seed=3)
    assert {name: o["message"] for name, o in found.items() if o["verdict"] not in ("pass", "undecided")} == {}


@pytest.mark.parametrize("seed", range(4))
def test_difference_quotients_decide_in_float32(seed):
    subject = subject_for("eagle3", "float32")
    check = next(c for c in checks.plan(subject.description, seed=seed) if c.quantity == "d_features")
    assert check.run(subject)["verdict"] == "pass"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda o: o.pop("logits"), "returned no output 'logits'"),
        (lambda o: o.update(logits=o["logits"][:6]), "logits has shape (6, 2, 10, 97); wanted (7, 2, 10, 97)"),
        (lambda o: o["logits"].__setitem__((2, 0, 1), np.nan), "step 3 has no finite logits at slot 1 of row 0"),
        (lambda o: o.update(step_losses=o["step_losses"][None]), "step_losses has shape (1, 7); wanted (7,)"),
    ],
)
def test_answers_that_cannot_be_read_are_failures(change, sentence):
    subject = subject_for("eagle3", "float32")

    def call(*arguments, original=subject.call, **keywords):
        result = original(*arguments, **keywords)
        outputs = dict(result.outputs)
        change(outputs)
        return Result(outputs, result.grads)

    subject.call = call
    for check in (c for c in checks.plan(subject.description) if c.stage == "pattern"):
        found = check.run(subject)
        if check.quantity in ("tokens", "step_losses"):
            assert found["verdict"] == "fail"
            assert sentence in found["message"]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("lk", "describe()['pattern'] is 'lk'; wanted a mapping"),
        ({}, "['step_weights'] is None; wanted a list of one number"),
        ({"step_weights": [1, float("nan")]}, "wanted a list of one number >= 0"),
        ({"step_weights": [1], "loss": "nll"}, "['loss'] is 'nll'; wanted one of lk, soft_ce, kl, tv"),
        (
            {"step_weights": [1], "denominator": "rows"},
            "['denominator'] is 'rows'; wanted one of supervised, all_slots",
        ),
        ({"step_weights": [1], "batch": 0}, "['batch'] is 0; wanted a number of rows from 1 to 4"),
        ({"step_weights": [1], "epsilon": 1}, "['epsilon'] is 1; wanted a number from 0"),
        ({"step_weights": [1], "documents": 1}, "['documents'] is 1; wanted True or False"),
        ({"step_weights": [1], "padding": "left"}, "['padding'] is 'left'; wanted True or False"),
        ({"step_weights": [1], "mask": 1}, "describe()['pattern'] has 'mask'; wanted some of loss, step_weights"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_by_name(said, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Description.from_dict({"name": "x", "formats": {"storage": "float32"}, "pattern": said})
    assert sentence in str(error.value)


def test_losses_are_the_textbook_ones():
    """Two tokens, p = (3/4, 1/4), q = (1/2, 1/2)."""
    target, draft = np.log([[[0.75, 0.25]]]), np.log([[[0.5, 0.5]]])
    wanted = {"lk": -np.log(0.75), "soft_ce": np.log(2), "tv": 0.25, "kl": 0.75 * np.log(1.5) - 0.25 * np.log(2)}
    for loss, value in wanted.items():
        assert Pattern(loss).slot_losses(draft, target)[0, 0] == pytest.approx(value, abs=1e-15)
    declared, losses, some = Pattern("lk", epsilon=0.5), np.array([[1.0, 2.0, 9.0]]), np.array([[True, True, False]])
    assert declared.step_loss(losses, some) == pytest.approx(3 / 2.5)
    assert Pattern("lk", denominator="all_slots").step_loss(losses, some) == pytest.approx(1.0)
    assert declared.step_loss(losses, ~np.ones((1, 3), bool)) == 0


def test_what_the_oracle_reads_is_what_the_specification_says():
    """Slot j of step k reads features 0..j and tokens 0..j+k-1 of its document (spec.md 3 and 4), by a formula here."""
    subject = subject_for("eagle3", "float64")
    check = next(c for c in checks.plan(subject.description) if c.quantity == "tokens")
    run = check_pattern.PatternRun(subject, *_case(check), "float64", 0)
    documents = run.inputs["documents"]
    for what, ahead in (("tokens", 1), ("features", 0)):
        for row, slot, seen in check_pattern.read_by_oracle(run, what):
            for k, b, t in np.argwhere(run.exists):
                same = b == row and documents[b, t] == documents[b, slot]
                assert seen[k, b, t] == (same and slot <= t + ahead * k), (what, k + 1, b, t, slot)
    assert check_pattern_losses.SIZES[0] < 1


def _case(check):
    from draftconf.conformance.checks.cases import cases_for
    from draftconf.reference.config import Choices

    choices = Choices(draft_input="eagle3")
    return cases_for(choices)[0], choices


@pytest.mark.parametrize(
    ("adapter", "package"),
    [
        ("speculators_unroll", "speculators"),
        ("specforge", "specforge"),
        ("specforge_unroll", "specforge"),
        ("modelopt_unroll", "modelopt"),
    ],
)
def test_an_adapter_without_its_package_says_how_to_install_it(adapter, package):
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with mock.patch.dict(os.environ), pytest.raises(ValueError, match=r"Install it with `make (matrix|peers)`"):
        load(f"conformance/adapters/{adapter}.py:adapter")


@pytest.mark.parametrize("name", ["zeros", "ones"])
def test_answers_that_never_move_are_faults_of_every_check_that_asks_for_a_move(name):
    """A null adapter's losses leave the difference quotients without an error."""
    subject = nulls.Null(Subject(load("fast")), getattr(nulls, name))
    found = {check.quantity: check.run(subject) for check in checks.plan(subject.description, policies=["float32"])
             if check.stage == "pattern"}  # fmt: skip
    assert {found[quantity]["verdict"] for quantity in ("tokens", "features", "recycle", "d_features")} == {"fail"}
