"""The comparators can fail: NaN, infinities, wrong shapes and dtypes, errors just over the bound, coherent errors."""

import numpy as np
import pytest

from draftconf.conformance.judging.bias import BIAS_LIMIT, Bias
from draftconf.conformance.judging.compare import Mismatch, compare, width
from draftconf.conformance.judging.decisions import judge_experts
from draftconf.conformance.judging.outcome import of_equality
from draftconf.reference.bounds import arithmetic
from draftconf.reference.running_error import Running

FLOAT32 = {"storage": "float32", "accumulate": "float32"}
BFLOAT16 = {"storage": "bfloat16", "accumulate": "float32"}
POINT = (1, "moe_norm")


def expected(size=(3, 4), error=1e-6):
    value = np.arange(np.prod(size), dtype=float).reshape(size) + 1
    return Running(value, np.full(size, error), np.full(size, error))


def ratio(actual, formats=FLOAT32, **keywords):
    return compare("x", actual, expected(**keywords), POINT, formats).ratio


def test_the_value_itself_has_ratio_zero():
    assert ratio(expected().value) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_fails(bad):
    actual = expected().value.copy()
    actual[1, 2] = bad
    comparison = compare("x", actual, expected(), POINT, FLOAT32)
    assert not comparison.ok
    assert comparison.index == (1, 2)


def test_an_expected_infinity_is_not_matched_by_a_number():
    assert not compare("x", np.ones(2), Running(np.array([1.0, np.inf])), POINT, FLOAT32).ok


def test_an_error_just_over_the_bound_fails_and_just_under_passes():
    assert ratio(expected().value + 1.001e-6) > 1
    assert ratio(expected().value + 0.999e-6) < 1


def test_without_a_bound_only_equality_passes():
    exact = Running(np.ones(3))
    assert compare("x", np.ones(3), exact, POINT, FLOAT32).ok
    assert not compare("x", np.nextafter(np.ones(3), 2), exact, POINT, FLOAT32).ok


def test_a_correct_rounding_to_bfloat16_reaches_ratio_one_and_no_more():
    halfway = Running(np.array([1.0 + 2.0**-8]))
    assert 0.9 < compare("x", np.array([1.0]), halfway, POINT, BFLOAT16).ratio <= 1
    assert not compare("x", np.array([1.0 - 2.0**-8]), halfway, POINT, BFLOAT16).ok


@pytest.mark.parametrize("shape", [(4, 3), (3,), (3, 4, 1), (1, 3, 4), ()])
def test_a_wrong_shape_is_never_broadcast(shape):
    with pytest.raises(Mismatch, match="shape"):
        compare("x", np.ones(shape), expected(), POINT, FLOAT32)


@pytest.mark.parametrize("dtype", [complex, object, "datetime64[s]"])
def test_a_dtype_that_is_no_number_is_refused(dtype):
    with pytest.raises(Mismatch, match="dtype"):
        compare("x", np.ones((3, 4)).astype(dtype), expected(), POINT, FLOAT32)


def test_masked_rows_are_not_compared_and_not_counted():
    actual = expected().value.copy()
    actual[0] = np.nan
    valid = np.array([False, True, True])
    comparison = compare("x", actual, expected(), POINT, FLOAT32, valid)
    assert comparison.ok
    assert comparison.compared == 8


def test_width_is_infinite_for_an_undecidable_zero_and_zero_for_a_certain_one():
    assert width(Running(np.zeros(2), np.ones(2), np.ones(2)), POINT, FLOAT32) == np.inf
    assert width(Running(np.zeros(2)), POINT, FLOAT32) == 0


# -- bias -------------------------------------------------------------------------------------------------------------


def z_of(error, rows=200, columns=64, formats=BFLOAT16):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(rows, columns))
    bias = Bias.empty()
    bias.add(y + error(y, rng), Running(y), POINT, formats, None)
    return bias.z()


def test_independent_roundings_have_no_bias():
    assert abs(z_of(lambda y, rng: rng.uniform(-1, 1, y.shape) * 2.0**-8 * np.abs(y))) < BIAS_LIMIT


def test_a_coherent_error_far_below_the_rounding_is_seen():
    assert abs(z_of(lambda y, rng: 2.0**-11 * y + rng.uniform(-1, 1, y.shape) * 2.0**-8 * np.abs(y))) > BIAS_LIMIT


def test_truncation_is_seen():
    assert abs(z_of(lambda y, rng: -rng.uniform(0, 1, y.shape) * 2.0**-7 * y)) > BIAS_LIMIT


def test_few_elements_say_nothing():
    assert z_of(lambda y, rng: 2.0**-9 * y, rows=10) is None


def test_equal_rows_are_one_cluster():
    y = np.tile(np.random.default_rng(0).normal(size=(1, 64)), (100, 1))
    bias = Bias.empty()
    bias.add(y * (1 + 2.0**-9), Running(y), POINT, BFLOAT16, None)
    assert bias.elements == 64


# -- decisions --------------------------------------------------------------------------------------------------------

SCORES = Running(np.array([[[0.9, 0.5, 0.4999, 0.1]]]), np.full((1, 1, 4), 1e-3), np.full((1, 1, 4), 1e-3))
NO_BIAS = np.zeros(4)


@pytest.mark.parametrize(
    ("ids", "flipped", "legal"),
    [
        ([0, 1], False, True),
        ([1, 0], False, True),  # any order
        ([0, 2], True, True),  # within the error
        ([0, 3], True, False),
        ([0, 0], True, False),  # twice the same
        ([0, 4], True, False),  # no such expert
        ([0, -1], True, False),
    ],
)
def test_expert_sets_are_judged_by_margin(ids, flipped, legal):
    judged = judge_experts(np.array([[ids]], np.int32), SCORES, NO_BIAS, 2, FLOAT32)
    assert (bool(judged[0][0, 0]), bool(judged[1][0, 0])) == (flipped, legal)


def test_experts_of_a_wrong_shape_or_dtype_are_refused():
    for bad in (np.zeros((1, 1, 3), np.int32), np.zeros((1, 1, 2))):
        with pytest.raises(Mismatch, match="experts"):
            judge_experts(bad, SCORES, NO_BIAS, 2, FLOAT32)


# -- equality ---------------------------------------------------------------------------------------------------------


def test_equality_knows_signs_of_zero_and_nan():
    assert of_equality("x", np.array([np.nan, 0.0]), np.array([np.nan, 0.0]))["verdict"] == "pass"
    assert of_equality("x", np.array([-0.0]), np.array([0.0]))["verdict"] == "fail"
    assert of_equality("x", np.array([1.0]), np.array([np.nan]))["verdict"] == "fail"
    assert of_equality("x", np.zeros(3, np.uint8), np.zeros(4, np.uint8))["verdict"] == "fail"


def test_arithmetic_must_be_declared_before_errors_are_computed():
    with pytest.raises(LookupError):
        Running(np.ones(2)) + 1.0
    with arithmetic(FLOAT32):
        assert (Running(np.ones(2)) + 1.0).linear.max() > 0
