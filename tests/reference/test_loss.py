"""The LK loss: its properties, its gradient set at ties, and its reduced vocabularies (spec.md section 5)."""

import numpy as np
import pytest
from helpers import assert_near
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from draftconf.reference.loss import LK_LOSS, gradient_violation, lk_loss, lk_loss_backward, step_loss, target_log_probs
from draftconf.reference.ops import log_softmax

EPS = 2.0**-52
logits = st.integers(1, 12).flatmap(
    lambda size: hnp.arrays(float, (2, size), elements=st.floats(-50, 50) | st.sampled_from([-1e4, 0.0, 1e4]))
)


def loss_of(target, draft):
    return lk_loss(draft, target_log_probs(target))


def gradient_of(target, draft):
    log_p = target_log_probs(target)
    return lk_loss_backward(draft, log_p, lk_loss(draft, log_p), np.ones(()))


@given(pair=logits)
def test_the_loss_is_finite_and_never_below_zero(pair):
    value = loss_of(*pair)
    assert np.isfinite(value)
    assert value >= -8 * EPS


@given(pair=logits)
def test_the_loss_is_zero_exactly_where_p_equals_q(pair):
    """exp(-loss) is 1 - sum |p - q| / 2, which is 1 for p = q and for nothing else."""
    p, q = (np.exp(log_softmax(x)) for x in pair)
    assert abs(np.exp(-loss_of(*pair)) - (1 - np.abs(p - q).sum() / 2)) <= 32 * EPS
    assert abs(loss_of(pair[0], pair[0])) <= 8 * EPS


@given(pair=logits, shifts=st.tuples(st.floats(-100, 100), st.floats(-100, 100)))
def test_a_constant_on_either_side_changes_nothing(pair, shifts):
    moved = pair + np.array(shifts)[:, None]
    rounding = EPS * (np.abs(pair).max() + 100)  # of the shifted logits themselves
    assert abs(loss_of(*moved) - loss_of(*pair)) <= 4 * rounding


@given(pair=logits, seed=st.integers(0, 999))
def test_a_common_permutation_permutes_the_gradient_and_keeps_the_loss(pair, seed):
    order = np.random.default_rng(seed).permutation(pair.shape[1])
    assert abs(loss_of(*pair[:, order]) - loss_of(*pair)) <= 16 * EPS * (1 + loss_of(*pair))
    p, q = (log_softmax(x) for x in pair)
    assume((np.abs(p - q) > 1e-9 * (1 + np.abs(p))).all())  # at a tie a rounding may choose another member of the set
    difference = gradient_of(*pair[:, order]) - gradient_of(*pair)[order]
    assert np.abs(difference).max() <= 32 * EPS * (1 + loss_of(*pair))


@given(pair=logits)
def test_the_gradient_sums_to_zero_lies_in_its_set_and_never_exceeds_one(pair):
    gradient = gradient_of(*pair)
    assert abs(gradient.sum()) <= 64 * EPS
    assert np.abs(gradient).max() <= 1 + 8 * EPS
    assert gradient_violation(pair[1], pair[0], gradient, 64 * EPS * (1 + loss_of(*pair))) <= 1


def member(target, draft, theta_at_ties) -> np.ndarray:
    """-(q / alpha)(theta - sum theta q): a member of the gradient set for any theta in [0, 1] where q = p."""
    log_p, log_q = log_softmax(target), log_softmax(draft)
    theta = np.where(log_q == log_p, theta_at_ties, log_q < log_p)
    q = np.exp(log_q)
    return -q / np.exp(np.minimum(log_p, log_q)).sum() * (theta - (theta * q).sum())


TIED_PAIRS = {  # two tokens swapped: the sums, and with them the logarithms of all other tokens, agree to the bit
    "one pair differs": (np.array([1.0, 2.0, 0.5, -1.0, 0.0]), np.array([2.0, 1.0, 0.5, -1.0, 0.0])),
    "ties of very different size": (np.array([3.0, -3.0, 6.0, -9.0]), np.array([-3.0, 3.0, 6.0, -9.0])),
    "all tie": (np.array([1.0, 2.0, 0.5, -1.0]), np.array([1.0, 2.0, 0.5, -1.0])),
    "all tie, uniform": (np.zeros(7), np.zeros(7)),
    "none ties": (np.array([1.0, 2.0, 0.5]), np.array([0.7, -2.0, 0.1])),
}


def tolerance_of(target, draft, gradient):
    """A few roundings of the two terms of every coordinate."""
    return 16 * EPS * (np.abs(gradient) + np.exp(log_softmax(draft)))


every_tie = pytest.mark.parametrize(("target", "draft"), TIED_PAIRS.values(), ids=TIED_PAIRS)


@every_tie
def test_every_choice_of_theta_at_ties_is_accepted(target, draft):
    rng = np.random.default_rng(0)
    thetas = [np.zeros(len(target)), np.ones(len(target)), *rng.random((200, len(target)))]
    thetas += list(rng.integers(0, 2, (50, len(target))).astype(float))
    for theta in thetas:
        gradient = member(target, draft, theta)
        assert gradient_violation(draft, target, gradient, tolerance_of(target, draft, gradient)) <= 1


@every_tie
def test_the_gradient_of_a_given_theta_is_that_member_of_the_set(target, draft):
    log_p, log_q = log_softmax(target), log_softmax(draft)
    at_ties = np.random.default_rng(2).random(len(target))
    theta = np.where(log_q == log_p, at_ties, log_q < log_p)
    gradient = lk_loss_backward(draft, log_p, lk_loss(draft, log_p), np.ones(()), theta)
    assert np.abs(gradient - member(target, draft, at_ties)).max() <= 8 * EPS


def test_within_the_margin_log_probabilities_count_as_equal():
    target, draft = np.array([1.0, 2.0, 0.5]), np.array([1.0, 2.0 + 1e-6, 0.4])
    log_p, log_q = log_softmax(target), log_softmax(draft)
    theta = (log_q < log_p).astype(float)
    nearest = np.argmin(np.abs(log_p - log_q))
    theta[nearest] = 0.5
    gradient = lk_loss_backward(draft, log_p, lk_loss(draft, log_p), np.ones(()), theta)
    gap = abs(log_p - log_q)[nearest]
    for margin, is_member in ((0.0, False), (0.9 * gap, False), (1.1 * gap, True)):
        violation = gradient_violation(draft, target, gradient, tolerance_of(target, draft, gradient), margin)
        assert (violation <= 1) == is_member


@every_tie
def test_a_change_of_1_percent_in_any_coordinate_is_rejected(target, draft):
    rng = np.random.default_rng(1)
    for theta in rng.random((20, len(target))):
        gradient = member(target, draft, theta)
        for x in np.flatnonzero(gradient):
            for factor in (0.99, 1.01):
                changed = np.where(np.arange(len(target)) == x, gradient * factor, gradient)
                assert gradient_violation(draft, target, changed, tolerance_of(target, draft, gradient)) > 1e3


@every_tie
def test_a_change_that_keeps_the_sum_is_rejected_where_no_tie_allows_it(target, draft):
    free = log_softmax(target) != log_softmax(draft)
    gradient = member(target, draft, np.full(len(target), 0.5))
    for x, y in np.ndindex(len(target), len(target)):
        if x != y and (free[x] or free[y]):
            changed = gradient.copy()
            # more than a tie can take up: theta moves by 2
            shift = 2 * np.exp(min(log_softmax(draft)[x], log_softmax(draft)[y]))
            changed[[x, y]] += shift, -shift
            assert gradient_violation(draft, target, changed, tolerance_of(target, draft, gradient)) > 1e6


def test_theta_outside_zero_to_one_is_rejected_even_if_all_tie():
    target = draft = np.array([1.0, 2.0, 0.5, -1.0])
    for low, high, is_member in ((0.0, 1.0, True), (0.25, 1.25, True), (0.0, 1.01, False), (-0.3, 0.9, False)):
        gradient = member(target, draft, np.array([low, high, 0.5, 0.6]))  # a constant added to theta changes nothing
        violation = gradient_violation(draft, target, gradient, tolerance_of(target, draft, gradient))
        assert (violation <= 1) == is_member, (low, high)


WRONG = {
    "negated": lambda g: -g,
    "zero": lambda g: 0 * g,
    "doubled": lambda g: 2 * g,
    "reversed": lambda g: g[::-1],
    "sum not zero": lambda g: g + 1e-9,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_gradients_are_rejected(wrong):
    target, draft = TIED_PAIRS["none ties"]
    gradient = gradient_of(target, draft)
    assert gradient_violation(draft, target, wrong(gradient), tolerance_of(target, draft, gradient)) > 1e6


def test_a_gradient_that_is_not_a_number_is_rejected():
    target, draft = TIED_PAIRS["one pair differs"]
    gradient = gradient_of(target, draft)
    for x in range(len(gradient)):
        assert not gradient_violation(draft, target, np.where(np.arange(5) == x, np.nan, gradient), 1e-12) <= 1


def test_the_loss_is_minus_the_log_of_the_shared_mass_whichever_side_is_which():
    """-log sum min(p, q) is symmetric, unlike a KL divergence."""
    p, q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.3, 0.5])
    assert_near(loss_of(p, q), -np.log(0.7))
    assert_near(loss_of(q, p), -np.log(0.7))


@pytest.mark.parametrize(("name", "value"), [("restricted", "0.2231"), ("renormalized", "0.0253")])
def test_a_reduced_vocabulary_keeps_or_drops_the_full_normaliser(name, value):
    """p = [.5, .3, .2] with tokens 0 and 1 kept, q = [.6, .4]: alpha is .5 + .3, or .6 + .375."""
    log_p = target_log_probs(np.log([0.5, 0.3, 0.2]), np.array([0, 1]), name)
    assert f"{lk_loss(np.log([0.6, 0.4]), log_p):.4f}" == value


def test_a_restricted_target_outside_the_kept_tokens_costs_at_least_its_missing_mass():
    rng = np.random.default_rng(2)
    target, ids = rng.normal(0, 2, 30), np.arange(0, 30, 3)
    log_p = target_log_probs(target, ids, "restricted")
    kept = np.exp(log_softmax(target))[ids].sum()
    assert lk_loss(rng.normal(0, 9, 10), log_p) > -np.log(kept)
    assert_near(lk_loss(target[ids], log_p), -np.log(kept))  # q = p on the kept tokens, renormalised


@pytest.mark.parametrize("name", ["restricted", "renormalized"])
def test_the_gradient_against_a_reduced_target_is_that_of_its_own_loss(name):
    rng = np.random.default_rng(3)
    target, draft, ids = rng.normal(0, 2, 30), rng.normal(0, 2, 10), rng.permutation(30)[:10]
    log_p = target_log_probs(target, ids, name)
    gradient = lk_loss_backward(draft, log_p, lk_loss(draft, log_p), np.ones(()))
    for x in range(10):
        moved = draft + 1e-30j * (np.arange(10) == x)
        assert_near(gradient[x], lk_loss(moved, log_p).imag / 1e-30)


def test_slots_are_independent_and_a_cotangent_scales_its_own_slot():
    rng = np.random.default_rng(4)
    draft, target = rng.normal(0, 2, (2, 3, 7)), rng.normal(0, 2, (2, 3, 7))
    log_p, d_loss = target_log_probs(target), rng.normal(0, 1, (2, 3))
    losses = LK_LOSS.forward(draft, log_p)
    d_draft, d_target = LK_LOSS.backward(draft, log_p, losses, d_loss)
    assert d_target is None  # the target gets no gradient
    for at in np.ndindex(2, 3):
        assert_near(losses[at], loss_of(target[at], draft[at]))
        assert_near(d_draft[at], d_loss[at] * gradient_of(target[at], draft[at]))


@pytest.mark.parametrize("reduction", ["supervised", "all_slots"])
def test_an_unsupervised_step_loss_is_exactly_zero_whatever_the_losses(reduction):
    op, losses, none = step_loss(reduction), np.array([[1.0, np.inf], [np.nan, 3.0]]), np.zeros((2, 2), bool)
    assert op.forward(losses, none) == 0.0
    assert (op.backward(losses, none, 0.0, 1.0)[0] == 0.0).all()
