"""Every scalar function, RMSNorm, softmax and the LK loss against mpmath at 50 digits (spec.md sections 4 and 5)."""

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from draftconf.reference import loss, ops

mpmath.mp.dps = 50
EPS = 2.0**-52
SMALLEST = 5e-324
ARGUMENTS = [0.0, -0.0, 1e-300, -1e-300, 1e-8, 0.3, -0.3, 1.0, -1.0, 4.0, -7.5, 25.0, -25.0, 36.7, -36.7, 100.0, -700.0,
             -740.0, 740.0, 1e4, -1e4]  # fmt: skip


def mp_sigmoid(x):
    return 1 / (1 + mpmath.exp(-mpf(x)))


def mp_situ(gate, up, beta, linear_beta):
    return (beta * mpmath.tanh(gate / beta) * mp_sigmoid(gate)) * (linear_beta * mpmath.tanh(up / linear_beta))


def mp_log_softmax(x):
    x = [mpf(float(v)) for v in x]
    top = max(x)
    total = top + mpmath.log(mpmath.fsum(mpmath.exp(v - top) for v in x))
    return [v - total for v in x]


def mp_loss(draft, log_p):
    """-log sum min(p, q) from the draft's logits (mpf) and log p (mpf)."""
    top = max(draft)
    total = top + mpmath.log(mpmath.fsum(mpmath.exp(v - top) for v in draft))
    return -mpmath.log(mpmath.fsum(mpmath.exp(min(p, v - total)) for v, p in zip(draft, log_p, strict=True)))


def close(actual, expected, relative=4 * EPS, absolute=SMALLEST) -> bool:
    """Within the relative error plus the absolute one; never true of a NaN."""
    return abs(mpf(float(actual)) - expected) <= relative * abs(expected) + absolute


@pytest.mark.parametrize("x", ARGUMENTS)
def test_sigmoid_is_right_to_rounding_on_both_sides(x):
    assert close(ops.sigmoid(np.array(x)), mp_sigmoid(x))


@pytest.mark.parametrize("x", ARGUMENTS)
def test_sigmoid_backward_is_its_derivative(x):
    s = mp_sigmoid(x)
    d_x = ops.sigmoid_backward(ops.sigmoid(np.array(x)), np.array(3.0))
    assert close(d_x, 3 * s * (1 - s), absolute=3 * EPS)  # 1 - y is exact, but y near 1 is rounded


@pytest.mark.parametrize("gate", ARGUMENTS)
@pytest.mark.parametrize("up", [0.0, 1e-300, -0.4, 3.0, -24.0, 1e4])
def test_situ_glu_and_its_backward_are_right_and_never_exceed_beta1_beta2(gate, up):
    beta, linear_beta = 4.0, 25.0
    y = ops.situ_glu(np.array(gate), np.array(up), beta, linear_beta)
    assert close(y, mp_situ(mpf(gate), mpf(up), mpf(4), mpf(25)), 16 * EPS, 100 * SMALLEST)
    assert abs(y) <= 100
    g, u = mpf(gate), mpf(up)
    t, s, v = mpmath.tanh(g / 4), mp_sigmoid(g), mpmath.tanh(u / 25)
    d_gate, d_up = ops.situ_glu_backward(np.array(gate), np.array(up), beta, linear_beta, np.array(0.7))
    d_y, cancels = mpf(0.7), 16 * EPS  # 1 - tanh^2 cancels far out, where the derivative is nothing
    want_gate = d_y * 25 * v * (1 / mpmath.cosh(g / 4) ** 2 * s + 4 * t * s * (1 - s))
    assert close(d_gate, want_gate, 16 * EPS, 25 * float(abs(v)) * cancels + SMALLEST)
    want_up = d_y * 4 * t * s / mpmath.cosh(u / 25) ** 2
    assert close(d_up, want_up, 16 * EPS, 4 * float(abs(t * s)) * cancels + SMALLEST)


@pytest.mark.parametrize(("gate", "up"), [(0.3, -0.4), (-7.5, 3.0), (2.0, 20.0), (-0.01, -11.0)])
def test_situ_glu_backward_is_the_numerical_derivative_at_50_digits(gate, up):
    d_gate, d_up = ops.situ_glu_backward(np.array(gate), np.array(up), 4.0, 25.0, np.array(1.0))
    assert close(d_gate, mpmath.diff(lambda g: mp_situ(g, mpf(up), 4, 25), mpf(gate)), 1e-14)
    assert close(d_up, mpmath.diff(lambda u: mp_situ(mpf(gate), u, 4, 25), mpf(up)), 1e-14)


ROWS = {
    "ordinary": [0.3, -1.2, 2.5, 0.01, -0.7],
    "zero": [0.0, 0.0, 0.0, 0.0, 0.0],
    "below epsilon": [1e-9, -2e-9, 3e-9, 0.0, 1e-12],
    "large": [1e100, -3e100, 2e99, 1.0, 0.0],
    "one of many": [1e8, 1e-8, 0.0, -1e-8, 1.0],
}
NORM_WEIGHT = np.array([0.5, 2.0, -1.3, 1.1, 0.9])


def mp_rms_norm(x, eps):
    x = [mpf(v) for v in x]
    r = 1 / mpmath.sqrt(mpmath.fsum(v * v for v in x) / len(x) + mpf(eps))
    return [mpf(float(w)) * v * r for w, v in zip(NORM_WEIGHT, x, strict=True)]


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rms_norm_is_right_to_rounding(row, eps):
    y = ops.rms_norm(np.array(row), NORM_WEIGHT, eps)
    assert all(close(a, b, 16 * EPS) for a, b in zip(y, mp_rms_norm(row, eps), strict=True))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rms_norm_backward_is_the_derivative_at_50_digits(row):
    eps, d_y = 1e-5, np.array([0.3, -1.0, 0.2, 0.9, -0.4])
    d_x, d_weight = ops.rms_norm_backward(np.array(row), NORM_WEIGHT, eps, d_y)
    x, g = [mpf(v) for v in row], [mpf(float(w)) * mpf(float(d)) for w, d in zip(NORM_WEIGHT, d_y, strict=True)]
    r = 1 / mpmath.sqrt(mpmath.fsum(v * v for v in x) / 5 + mpf(eps))
    inner = mpmath.fsum(a * b for a, b in zip(g, x, strict=True))
    for j in range(5):
        # d/dx_j of sum_i g_i x_i r, with dr/dx_j = -r^3 x_j / 5; its two terms may cancel
        terms = g[j] * r, -(r**3) * x[j] / 5 * inner
        assert close(d_x[j], sum(terms), absolute=16 * EPS * float(sum(map(abs, terms))))
        assert close(d_weight[j], mpf(float(d_y[j])) * x[j] * r, 16 * EPS)


def test_rms_norm_weight_gradient_sums_over_all_rows():
    rng = np.random.default_rng(0)
    x, w, d_y = rng.normal(size=(2, 3, 5)), rng.normal(size=5), rng.normal(size=(2, 3, 5))
    rows = [ops.rms_norm_backward(x[i], w, 1e-5, d_y[i])[1] for i in np.ndindex(2, 3)]
    np.testing.assert_allclose(ops.rms_norm_backward(x, w, 1e-5, d_y)[1], sum(rows), rtol=1e-14)


LOGITS = {
    "ordinary": [0.3, -1.2, 2.5, 0.0, -0.7],
    "equal": [7.0] * 5,
    "+-1e4": [1e4, -1e4, 9999.5, 0.0, 1e4],
    "shifted far": [1e8 + 1, 1e8, 1e8 - 3, 1e8, 1e8 + 0.5],
    "one-hot": [800.0, 0.0, 0.0, 0.0, -5.0],
    "one": [3.0],
}


@pytest.mark.parametrize("row", LOGITS.values(), ids=LOGITS)
def test_log_softmax_and_softmax_are_right_to_rounding(row):
    want = mp_log_softmax(row)
    for log_p, p, exact in zip(ops.log_softmax(np.array(row)), ops.softmax(np.array(row)), want, strict=True):
        assert close(log_p, exact, 4 * EPS, 8 * EPS)
        assert close(p, mpmath.exp(exact), 16 * EPS)


def test_softmax_gives_a_minus_infinity_exactly_nothing():
    assert ops.softmax(np.array([1.0, -np.inf, 1.0])).tolist() == [0.5, 0.0, 0.5]


def peak(at, height, size=1000):
    x = np.zeros(size)
    x[at] = height
    return x


_rng = np.random.default_rng(7)
_random = _rng.normal(0, 3, 40)
#: target logits, draft logits
PAIRS = {
    "ordinary": (_random, _rng.normal(0, 3, 40)),
    "nearly equal": (_random, _random + _rng.normal(0, 1e-6, 40)),
    "+-1e4": (_rng.choice([-1e4, 0.0, 1e4], 60), _rng.choice([-1e4, 0.0, 1e4], 60)),
    "gap 200": (peak(0, 200.0), peak(1, 200.0)),
    "gap 800": (peak(0, 800.0), peak(1, 800.0)),
    "gap 1e4": (peak(0, 1e4), peak(1, 1e4)),
    "same peak": (peak(3, 50.0), peak(3, 40.0)),
    "one-hot target": (peak(5, 1e4, 9), _rng.normal(0, 1, 9)),
    "one-hot draft": (_rng.normal(0, 1, 9), peak(5, 1e4, 9)),
    "one token": (np.array([2.0]), np.array([-3.0])),
    "two tokens": (np.array([0.0, 1.0]), np.array([1.0, 0.0])),
}


@pytest.mark.parametrize(("target", "draft"), PAIRS.values(), ids=PAIRS)
def test_lk_loss_is_right_to_rounding(target, draft):
    want = mp_loss([mpf(float(v)) for v in draft], mp_log_softmax(target))
    assert close(loss.lk_loss(draft, loss.target_log_probs(target)), want, 8 * EPS, 16 * EPS)


@pytest.mark.parametrize(("gap", "value"), [(200.0, "193.0922447"), (800.0, "793.0922447")])
def test_lk_loss_of_two_peaks_has_the_digits_of_the_specification(gap, value):
    assert f"{loss.lk_loss(peak(1, gap), loss.target_log_probs(peak(0, gap))):.7f}" == value


def mp_gradient(target, draft, counts=None):
    """Loss, gradient with theta 1 for q < p, else 0, and what one rounding of the logarithms may do to each entry.

    An entry is the difference of two terms, each the exponential of a logarithm that float64 holds to a rounding.
    ``counts`` gives each token a multiplicity.
    """
    counts = [1] * len(target) if counts is None else [int(c) for c in counts]
    logs = []
    for x in (target, draft):
        x = [mpf(float(v)) for v in x]
        total = mpmath.log(mpmath.fsum(c * mpmath.exp(v - max(x)) for c, v in zip(counts, x, strict=True))) + max(x)
        logs.append([v - total for v in x])
    alpha = mpmath.fsum(c * mpmath.exp(min(a, b)) for c, a, b in zip(counts, *logs, strict=True))
    theta = [int(b < a) for a, b in zip(*logs, strict=True)]
    q = [mpmath.exp(b) for b in logs[1]]
    s = mpmath.fsum(c * t * x for c, t, x in zip(counts, theta, q, strict=True))
    loss_, pairs = -mpmath.log(alpha), list(zip(theta, q, strict=True))
    gradient = [-(x / alpha) * (t - s) for t, x in pairs]
    sizes = [(x / alpha) * (t + s) * (1 + loss_ + abs(b)) for (t, x), b in zip(pairs, logs[1], strict=True)]
    return loss_, gradient, [EPS * float(size) for size in sizes]


def oracle_gradient(target, draft):
    log_p = loss.target_log_probs(target)
    value = loss.lk_loss(draft, log_p)
    return value, loss.lk_loss_backward(draft, log_p, value, np.ones(()))


UNTIED = [name for name in PAIRS if name not in ("one token", "+-1e4")]


@pytest.mark.parametrize("name", UNTIED)
def test_lk_gradient_is_the_formula_at_50_digits(name):
    _, gradient = oracle_gradient(*PAIRS[name])
    _, want, roundings = mp_gradient(*PAIRS[name])
    for got, exact, rounding in zip(gradient, want, roundings, strict=True):
        assert close(got, exact, 4 * EPS, 8 * rounding + SMALLEST)


@pytest.mark.parametrize("name", ["ordinary", "one-hot target", "same peak", "two tokens"])
def test_lk_gradient_is_the_numerical_derivative_at_50_digits(name):
    target, draft = (x[:9] for x in PAIRS[name])
    _, gradient = oracle_gradient(target, draft)
    log_p, at = mp_log_softmax(target), [mpf(float(v)) for v in draft]
    for x in range(len(at)):
        want = mpmath.diff(lambda v, x=x: mp_loss([*at[:x], v, *at[x + 1 :]], log_p), at[x], h=mpf(10) ** -20)
        assert close(gradient[x], want, 1e-12, 1e-15)


@pytest.mark.parametrize("name", ["+-1e4", "one token"])
def test_lk_gradient_at_ties_is_a_member_of_the_gradient_set(name):
    target, draft = PAIRS[name]
    _, gradient = oracle_gradient(target, draft)
    assert loss.gradient_violation(draft, target, gradient, 16 * EPS) <= 1


def test_p_equal_to_q_costs_nothing_and_pulls_nowhere():
    for target in (_random, peak(0, 800.0), np.zeros(163840)):
        value, gradient = oracle_gradient(target, target)
        assert abs(value) <= 4 * EPS
        assert np.abs(gradient).max() <= 4 * EPS


@pytest.mark.parametrize("spread", [3.0, 200.0])
def test_the_full_vocabulary_of_163840_is_right_to_rounding(spread):
    """2048 distinct pairs of logits, each as often as chance has it, so that mpmath has 2048 terms to add."""
    rng = np.random.default_rng(1)
    pairs = rng.normal(0, spread, (2, 2048))
    which = rng.integers(0, 2048, 163840)
    value, gradient = oracle_gradient(pairs[0][which], pairs[1][which])
    want, *distinct = mp_gradient(*pairs, np.bincount(which, minlength=2048))
    assert close(value, want, 16 * EPS)
    exact, rounding = (np.array([float(x) for x in values])[which] for values in distinct)
    assert (np.abs(gradient - exact) <= 16 * rounding + SMALLEST).all()
    assert abs(gradient.sum()) <= 1e-13
