"""The bounds hold for honest arithmetic in the declared format, and are not absurdly wide."""

import numpy as np
import pytest

from draftconf.reference import loss, ops
from draftconf.reference.bounds import COMPARISONS, FAILURE_PROBABILITY, LAMBDA, arithmetic
from draftconf.reference.formats import FORMATS, round_to
from draftconf.reference.running_error import Running

FLOAT32 = {"storage": "float32", "accumulate": "float32"}


def rng():
    return np.random.default_rng(7)


def test_lambda_follows_from_the_number_of_comparisons():
    assert 2 * COMPARISONS * np.exp(-(LAMBDA**2) / 2) == pytest.approx(FAILURE_PROBABILITY)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_round_to_is_the_nearest_value_half_to_even(name):
    form = FORMATS[name]
    u = form.unit_roundoff
    assert round_to(np.array([1 + u, 1 + 3 * u, 1 + 1.01 * u]), name).tolist() == [1, 1 + 4 * u, 1 + 2 * u]
    assert round_to(np.array([form.smallest_subnormal * 0.5]), name)[0] == 0
    assert round_to(np.array([form.largest * (1 + u)]), name)[0] == np.inf
    if name != "bfloat16":
        x = rng().normal(size=1000) * 10.0 ** rng().integers(-12, 4, 1000)
        assert np.array_equal(round_to(x, name), x.astype(name).astype(float))


def float32_sum(products: np.ndarray, order: np.ndarray) -> np.ndarray:
    total = np.zeros(products.shape[0], np.float32)
    for k in order:
        total = (total + products[:, k].astype(np.float32)).astype(np.float32)
    return total.astype(float)


@pytest.mark.parametrize("count", [8, 64, 512])
@pytest.mark.parametrize("kind", ["random", "positive first", "sorted", "cancelling"])
def test_sums_in_any_order_stay_within_the_reduce_rule(count, kind):
    a = rng().normal(size=(200, count)).astype(np.float32).astype(float)
    if kind == "cancelling":
        a[:, count // 2 :] = -a[:, : count // 2] * (1 + 2.0**-10)
        a = round_to(a, "float32")
    order = {"random": rng().permutation(count), "sorted": np.argsort(a[0])}.get(kind, np.argsort(-a[0]))
    if kind == "positive first":
        a = -np.sort(-a, axis=1)
        order = np.arange(count)
    with arithmetic(FLOAT32):
        total = np.sum(Running(a), axis=-1)
    error = np.abs(float32_sum(a, order) - a.sum(axis=1))
    worst = np.max(error / total.bound())
    assert worst <= 1
    assert np.max(total.bound() / np.abs(a).sum(axis=1)) < 4 * count * 2.0**-24


def test_a_truncating_accumulator_exceeds_nearest_and_fits_tensor_core():
    a = np.abs(rng().normal(size=(50, 4096)))
    products = round_to(a, "float32")
    total = np.zeros(50)
    for k in range(products.shape[1]):
        exact = total + products[:, k]
        scale = np.ldexp(1.0, np.frexp(exact)[1] - 24)
        total = np.floor(exact / scale) * scale
    with arithmetic(FLOAT32):
        nearest = np.sum(Running(products), axis=-1)
    with arithmetic({"storage": "float32", "accumulate": "tensor-core"}):
        core = np.sum(Running(products), axis=-1)
    error = np.abs(total - products.sum(axis=1))
    assert np.max(error / nearest.bound()) > 1
    assert np.max(error / core.bound()) <= 1


def plain_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_situ(x):
    return np.float32(4) * np.tanh(x / 4) / (1 + np.exp(-x)) * 25 * np.tanh(x / 25)


def plain_rms_norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5))


#: The oracle's text, and the same function in float32 NumPy.
ELEMENTWISE = {
    "sigmoid": (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "softmax": (ops.softmax, plain_softmax),
    "situ": (lambda x: ops.situ_glu(x, x, 4.0, 25.0), plain_situ),
    "rms_norm": (lambda x: ops.rms_norm(x, 1.0, 1e-5), plain_rms_norm),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_float32_evaluation_of_a_stage_stays_within_its_bound(name):
    oracle, plain = ELEMENTWISE[name]
    x = round_to(rng().normal(size=(64, 96)) * 10.0 ** rng().integers(-3, 2, (64, 1)), "float32")
    with arithmetic(FLOAT32):
        y = oracle(Running(x))
    error = np.abs(plain(x.astype(np.float32)).astype(float) - oracle(x))
    assert np.max(error / y.bound()) <= 1
    assert np.median(y.bound() / (np.abs(y.value) + 1e-30)) < 1000 * 2.0**-24


def test_the_value_of_a_running_number_is_the_oracles_own():
    x, p = rng().normal(size=(5, 33)), ops.log_softmax(rng().normal(size=(5, 33)))
    with arithmetic(FLOAT32):
        y = loss.lk_loss(Running(x), p)
    assert np.allclose(y.value, loss.lk_loss(x, p), rtol=1e-14, atol=0)  # same text, sums regrouped


def test_errors_that_enter_come_out_propagated():
    x, e = rng().normal(size=(20, 40)), 1e-3
    with arithmetic({"storage": "float64"}):
        y = ops.softmax(Running(x, np.full(x.shape, e / LAMBDA), np.full(x.shape, e)))
    moved = ops.softmax(x + e * rng().choice([-1, 1], x.shape))
    assert np.all(np.abs(moved - y.value) <= y.linear)
    assert np.max(y.linear) < 10 * e


@pytest.mark.parametrize(("gap", "open_"), [(0.0, True), (1e-8, True), (1e-3, False)])
def test_an_uncertain_mask_widens_the_lk_gradient_and_a_certain_one_does_not(gap, open_):
    draft, target = np.zeros((2, 1, 4))
    draft[0, :2], target[0, :2] = [3.0, 1.0], [1.0, 3.0]
    draft[0, 3] += gap  # tokens 2 and 3 tie, or nearly
    with arithmetic(FLOAT32):
        log_p = ops.log_softmax(Running(target))
        value = loss.lk_loss(Running(draft), log_p)
        d = loss.lk_loss_backward(Running(draft), log_p, value, np.ones(1))
    assert bool(d.bound()[0, 3] > 1e-2) == open_


def test_mx_of_an_uncertain_value_covers_both_sides_of_a_tie():
    x = np.zeros((1, 32))
    x[0, 0], x[0, 1] = 4.0, 1.25  # 1.25 lies between 1 and 1.5 on the E2M1 grid
    e = np.where(x == 1.25, 1e-6, 0.0)
    with arithmetic(FLOAT32):
        y = Running(x, e, e).quantized("mxfp4", "floor", "stored")
    assert y.value[0, 1] == 1.0
    assert y.bound()[0, 1] == 0.5
    assert y.bound()[0, 0] == 0


def test_an_unknown_operation_is_refused_rather_than_guessed():
    with arithmetic(FLOAT32), pytest.raises(TypeError):
        np.cumsum(Running(np.ones(3)))
