"""Losses other than LK: the oracle's against mpmath, and the suite's verdict on honest and on faulty code."""

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mpf

from draftconf.conformance.adapters.reference import Reference
from draftconf.conformance.checks import plan as checks
from draftconf.conformance.checks.losses import loss_row
from draftconf.conformance.protocol.description import Description
from draftconf.conformance.protocol.losses import LOSSES, Declared
from draftconf.conformance.protocol.subject import Subject
from draftconf.conformance.torch_helper import TorchAdapter, stage
from draftconf.reference.divergences import DIVERGENCES, REDUCTIONS, divergence, hybrid
from draftconf.reference.ops import log_softmax

mpmath.mp.dps = 50
SLOTS, WIDTH = 4, 5
MASK = np.array([True, False, True, True])
HYBRIDS = [(first, reduction, over) for first in ("kl", "soft_ce") for reduction, over in
           (("none", "none"), ("supervised", "supervised"), ("supervised", "all_slots"))]  # fmt: skip


def logits(seed: int = 0) -> np.ndarray:
    """Draft and target. [2, SLOTS, WIDTH]."""
    return 3 * np.random.default_rng(seed).normal(size=(2, SLOTS, WIDTH))


# -- the oracle --------------------------------------------------------------------------------------------------------


def mp_laws(draft, target):
    laws = []
    for x in (draft, target):
        powers = [mpmath.exp(mpf(v)) for v in x]
        laws.append([v / mpmath.fsum(powers) for v in powers])
    return laws


def mp_kl(a, b):
    return mpmath.fsum(x * mpmath.log(x / y) for x, y in zip(a, b, strict=True))


def mp_middle(q, p):
    return [(x + y) / 2 for x, y in zip(q, p, strict=True)]


#: Of q and p, written another way than in the oracle.
MP = {
    "soft_ce": lambda q, p: mp_kl(p, q) - mpmath.fsum(x * mpmath.log(x) for x in p),
    "kl": lambda q, p: mp_kl(p, q),
    "reverse_kl": lambda q, p: mp_kl(q, p),
    "js": lambda q, p: (mp_kl(p, mp_middle(q, p)) + mp_kl(q, mp_middle(q, p))) / 2,
    "tv": lambda q, p: mpmath.fsum(abs(x - y) for x, y in zip(q, p, strict=True)) / 2,
}


def mp_reduced(values, reduction: str):
    if reduction == "none":
        return values
    kept = [v for v, counts in zip(values, MASK, strict=True) if counts]
    return mpmath.fsum(kept) / (len(kept) if reduction == "supervised" else len(values))


def mp_slots(name: str, draft, target):
    return [MP[name](*mp_laws(d, t)) for d, t in zip(draft, target, strict=True)]


def mp_loss(name: str, draft, target, reduction: str):
    return mp_reduced(mp_slots(name, draft, target), reduction)


def mp_hybrid(first: str, draft, target, reduction: str, over: str, weights=None):
    """``weights`` hold w where it must not move."""
    one, tv = mp_loss(first, draft, target, over), mp_loss("tv", draft, target, reduction)
    if reduction != "none":
        one, tv = [one], [tv]
    w = weights or [mpmath.exp(-3 * (1 - x)) for x in tv]
    found = [v * a + (1 - v) * b for v, a, b in zip(w, one, tv, strict=True)]
    return (found if reduction == "none" else found[0]), w


def mp_gradient(function, draft) -> np.ndarray:
    """d sum(function) / d draft by mpmath's own differences."""

    def total(x, i, j):
        moved = [list(row) for row in draft]
        moved[i][j] = x
        value = function(moved)
        return mpmath.fsum(value) if isinstance(value, list) else value

    rows = [[float(mpmath.diff(lambda x, i=i, j=j: total(x, i, j), mpf(draft[i][j]))) for j in range(WIDTH)]
            for i in range(SLOTS)]  # fmt: skip
    return np.array(rows)


def gradient(op, draft, log_p):
    y = op.forward(draft, log_p, MASK)
    return op.backward(draft, log_p, MASK, y, np.ones(np.shape(y)))[0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients_are_those_of_mpmath(name, reduction):
    draft, target = logits()
    op, log_p = divergence(name, reduction), log_softmax(target)
    np.testing.assert_allclose(
        op.forward(draft, log_p, MASK), np.array(mp_loss(name, draft, target, reduction), float), rtol=1e-14, atol=1e-14
    )
    wanted = mp_gradient(lambda x: mp_loss(name, x, target, reduction), draft)
    np.testing.assert_allclose(gradient(op, draft, log_p), wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("first", "reduction", "over"), HYBRIDS)
def test_the_hybrid_and_its_gradient_with_the_weight_held_are_those_of_mpmath(first, reduction, over):
    draft, target = logits(1)
    op, log_p = hybrid(first, 3.0, reduction, over), log_softmax(target)
    value, held = mp_hybrid(first, draft, target, reduction, over)
    np.testing.assert_allclose(op.forward(draft, log_p, MASK), np.array(value, float), rtol=1e-13)
    wanted = mp_gradient(lambda x: mp_hybrid(first, x, target, reduction, over, held)[0], draft)
    np.testing.assert_allclose(gradient(op, draft, log_p), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_of_equal_laws_every_divergence_is_zero_and_stays_finite_on_disjoint_ones(name):
    peaks = np.array([[0.0, 200.0, 0.0], [200.0, 0.0, 0.0]])
    op = divergence(name, "none")
    value = op.forward(peaks, log_softmax(peaks[::-1]), None)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient(op, peaks, log_softmax(peaks[::-1]))).all()
    if name != "soft_ce":
        np.testing.assert_allclose(op.forward(peaks, log_softmax(peaks), None), 0, atol=1e-15)
        np.testing.assert_allclose(gradient(op, peaks, log_softmax(peaks)), 0, atol=1e-15)


# -- the suite ---------------------------------------------------------------------------------------------------------


def overlap(q, p):
    return torch.minimum(q, p).sum(-1)


class Textbook(TorchAdapter):
    """Honest losses of probabilities; a subclass gets one of them wrong."""

    name, layouts = "textbook", ["eagle3"]
    policies = {name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")}
    losses = {name: {} for name in LOSSES} | {"soft_ce_loss": {"reduction": "all_slots"}}
    weight = staticmethod(lambda q, p: torch.exp(-3 * overlap(q, p)).detach())

    def laws(self, t):
        return (t[name].float().softmax(-1) for name in ("draft_logits", "target_logits"))

    @stage(frozen=("target_logits",))
    def soft_ce_loss(self, t, forced):
        _, p = self.laws(t)
        losses = -(p * t["draft_logits"].float().log_softmax(-1)).sum(-1)
        return {"loss": torch.where(t["mask"], losses, 0).mean()}

    def kl(self, t):
        log_q, log_p = (t[name].float().log_softmax(-1) for name in ("draft_logits", "target_logits"))
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    @stage(frozen=("target_logits",))
    def kl_loss(self, t, forced):
        return {"loss": self.kl(t)}

    @stage(frozen=("target_logits",))
    def reverse_kl_loss(self, t, forced):
        return {"loss": self.kl({"draft_logits": t["target_logits"], "target_logits": t["draft_logits"]})}

    @stage(frozen=("target_logits",))
    def js_loss(self, t, forced):
        log_q, log_p = (t[name].float().log_softmax(-1) for name in ("draft_logits", "target_logits"))
        middle = torch.logaddexp(log_q, log_p) - np.log(2)
        return {"loss": (log_p.exp() * (log_p - middle) + log_q.exp() * (log_q - middle)).sum(-1) / 2}

    @stage(frozen=("target_logits",))
    def tv_loss(self, t, forced):
        return {"loss": (torch.subtract(*self.laws(t))).abs().sum(-1) / 2}

    @stage(frozen=("target_logits",))
    def hybrid_loss(self, t, forced):
        q, p = self.laws(t)
        w = self.weight(q, p)
        return {"loss": w * self.kl(t) + (1 - w) * (1 - overlap(q, p))}


class WeightNotDetached(Textbook):
    weight = staticmethod(lambda q, p: torch.exp(-3 * overlap(q, p)))


class WeightOfTheMean(Textbook):
    weight = staticmethod(lambda q, p: torch.exp(-3 * overlap(q, p).mean()).detach())


class WeightOfAnotherDecay(Textbook):
    weight = staticmethod(lambda q, p: torch.exp(-overlap(q, p)).detach())


class KLOfRoundedLogarithms(Textbook):
    """The logarithm of a probability that has vanished."""

    def kl(self, t):
        q, p = (t[name].float().softmax(-1) for name in ("draft_logits", "target_logits"))
        return (p * (p / q.clamp(min=1e-12)).clamp(min=1e-12).log()).sum(-1)


class CrossEntropyOfSupervised(Textbook):
    @stage(frozen=("target_logits",))
    def soft_ce_loss(self, t, forced):
        _, p = self.laws(t)
        losses = -(p * t["draft_logits"].float().log_softmax(-1)).sum(-1)
        return {"loss": losses[t["mask"]].mean()}


class WholeVariation(Textbook):
    @stage(frozen=("target_logits",))
    def tv_loss(self, t, forced):
        return {"loss": (torch.subtract(*self.laws(t))).abs().sum(-1)}


class JensenShannonTowardTheTarget(Textbook):
    @stage(frozen=("target_logits",))
    def js_loss(self, t, forced):
        log_q, log_p = (t[name].float().log_softmax(-1) for name in ("draft_logits", "target_logits"))
        middle = torch.logaddexp(log_q, log_p) - np.log(2)
        return {"loss": (log_p.exp() * (log_p - middle)).sum(-1)}


class TargetNotFrozen(Textbook):
    @stage
    def kl_loss(self, t, forced):
        return {"loss": self.kl(t)}


def outcomes(adapter, seed: int = 0) -> dict:
    """By stage, quantity, policy and case, the outcome of every check of a loss."""
    subject = Subject(adapter)
    plan = [check for check in checks.plan(subject.description, seed=seed) if check.stage in LOSSES]
    return {(c.stage, c.quantity, c.policy, c.case): c.run(subject) for c in plan}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("adapter", [Textbook(), Reference()], ids=lambda adapter: type(adapter).__name__)
def test_honest_losses_pass(adapter, seed):
    found = outcomes(adapter, seed)
    assert len(found) >= 6 * 4 * 3
    assert {at: o["message"] for at, o in found.items() if o["verdict"] != "pass"} == {}


@pytest.mark.parametrize(
    ("adapter", "stage_name", "quantity"),
    [
        (WeightNotDetached, "hybrid_loss", "d_draft_logits"),
        (WeightOfTheMean, "hybrid_loss", "loss"),
        (WeightOfAnotherDecay, "hybrid_loss", "loss"),
        (KLOfRoundedLogarithms, "kl_loss", "loss"),
        (CrossEntropyOfSupervised, "soft_ce_loss", "loss"),
        (WholeVariation, "tv_loss", "loss"),
        (JensenShannonTowardTheTarget, "js_loss", "loss"),
        (TargetNotFrozen, "kl_loss", "frozen"),
    ],
)
def test_a_planted_fault_is_caught_by_its_own_stage(adapter, stage_name, quantity):
    failing = {at[:2] for at, outcome in outcomes(adapter()).items() if outcome["verdict"] == "fail"}
    assert (stage_name, quantity) in failing
    with_kl = {"hybrid_loss", "reverse_kl_loss"} if stage_name == "kl_loss" else set()
    assert {name for name, _ in failing} <= {stage_name} | with_kl


def test_a_failing_slot_is_shown_as_small_as_it_can_be():
    found = outcomes(KLOfRoundedLogarithms())[("kl_loss", "loss", "float32", "extreme")]
    assert "smallest input: draft_logits = [" in found["message"]
    assert len(found["worst"]["operands"]) == 2


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (["kl_loss"], "describe()['losses'] is ['kl_loss']; wanted a mapping"),
        ({"nll": {}}, "describe()['losses'] has 'nll'; wanted some of soft_ce_loss, kl_loss"),
        ({"kl_loss": "mean"}, "describe()['losses']['kl_loss'] is 'mean'; wanted a mapping"),
        ({"kl_loss": {"decay": 1.0}}, "['kl_loss'] has 'decay'; wanted some of reduction"),
        ({"kl_loss": {"reduction": "mean"}}, "['reduction'] is 'mean'; wanted one of none, supervised, all_slots"),
        ({"hybrid_loss": {"first": "tv"}}, "['first'] is 'tv'; wanted one of kl, soft_ce"),
        ({"hybrid_loss": {"decay": -1}}, "['decay'] is -1; wanted a number >= 0"),
        ({"hybrid_loss": {"decay": True}}, "['decay'] is True; wanted a number >= 0"),
        ({"hybrid_loss": {"first_reduction": "supervised"}}, "reduces one of its two terms; wanted both or neither"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_by_name(said, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Description.from_dict({"name": "x", "formats": {"storage": "float32"}, "losses": said})
    assert sentence in str(error.value)


def test_the_declared_hybrid_is_the_one_that_is_computed():
    said = {"hybrid_loss": {"first": "soft_ce", "decay": 1.0, "reduction": "supervised"}}
    declared = Declared.of("hybrid_loss", said["hybrid_loss"])
    assert (declared.first_reduction, declared.first) == ("supervised", "soft_ce")
    draft, target = logits(2)
    node = loss_row("hybrid_loss", said).nodes(None, None)[1]
    one, tv = (divergence(name, "supervised").forward(draft, log_softmax(target), MASK) for name in ("soft_ce", "tv"))
    w = np.exp(tv - 1)
    assert node.op.forward(draft, log_softmax(target), MASK) == pytest.approx(w * one + (1 - w) * tv)


def test_adapters_that_declare_none_are_asked_for_none():
    description = Description.from_dict({"name": "x", "formats": {"storage": "float32"}})
    assert not [check for check in checks.plan(description) if check.stage in LOSSES]
