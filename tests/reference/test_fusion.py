"""W_E3 starts as [0 0 I]: the fused feature is the high one, exactly, in every storage format (spec.md section 2)."""

import numpy as np
import pytest
from helpers import LAYOUTS, MICRO, assert_same_bits, case
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from draftconf.reference.formats import round_to
from draftconf.reference.fusion import fusion, initial_fc
from draftconf.reference.unroll import unroll

DTYPES = {"float64": np.float64, "float32": np.float32, "bfloat16": np.float32, "float16": np.float16}


def extremes(name: str) -> np.ndarray:
    """Zeros of both signs, the largest and smallest values of both signs, and ordinary ones. [n]."""
    info = np.finfo(DTYPES[name])
    bfloat16 = name == "bfloat16"
    largest = float(round_to(3.389e38, "bfloat16")) if bfloat16 else float(info.max)
    tiny = 2.0**-133 if bfloat16 else float(info.smallest_subnormal)
    values = [0.0, -0.0, largest, -largest, tiny, -tiny, float(info.tiny), 1.0, -1.0, 0.333, 1e-4, -1234.5]
    return np.array(values)


def in_format(x, name: str) -> np.ndarray:
    return round_to(x, "bfloat16").astype(np.float32) if name == "bfloat16" else np.asarray(x).astype(DTYPES[name])


@pytest.mark.parametrize("name", DTYPES)
def test_the_initial_fusion_returns_the_high_feature_exactly(name):
    values = in_format(extremes(name), name)
    rng = np.random.default_rng(0)
    high = np.stack([values, values[::-1], *(rng.permutation(values) for _ in range(20))])
    low, mid = (rng.permutation(high.ravel()).reshape(high.shape) for _ in range(2))
    fused = fusion(low, mid, high, in_format(initial_fc(len(values)), name))
    assert fused.dtype == high.dtype
    assert np.array_equal(fused, high)  # zeros compare equal whatever their sign
    nonzero = high != 0
    assert_same_bits(fused[nonzero], high[nonzero])


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
def test_the_initial_fusion_returns_any_finite_high_feature_exactly(name, data):
    width = {"float64": 64, "float32": 32, "bfloat16": 32, "float16": 16}[name]
    values = st.floats(allow_nan=False, allow_infinity=False, width=width)
    if name == "bfloat16":
        values = values.map(lambda x: float(round_to(x, "bfloat16"))).filter(np.isfinite)
    low, mid, high = (in_format(data.draw(hnp.arrays(float, (2, 5), elements=values)), name) for _ in range(3))
    assert np.array_equal(fusion(low, mid, high, in_format(initial_fc(5), name)), high)


def test_low_mid_and_high_meet_their_own_columns_in_this_order():
    low, mid, high = np.diag([1.0, 2.0, 3.0])[:, None]  # [1, 0, 0], [0, 2, 0], [0, 0, 3]
    fc = np.arange(27.0).reshape(3, 9)
    assert np.array_equal(fusion(low, mid, high, fc), [fc[:, 0] + 2 * fc[:, 4] + 3 * fc[:, 8]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_unroll_starts_from_the_high_feature_and_still_gives_low_and_mid_a_gradient(layout):
    params, inputs, config, choices = case({"draft_input": layout}, MICRO)
    params["fc.weight"] = initial_fc(config.hidden_size)
    result = unroll(params, inputs, config, choices)
    assert np.array_equal(result.trace["1/fusion"], inputs["high"])
    d = config.hidden_size
    for third in (slice(0, d), slice(d, 2 * d), slice(2 * d, None)):
        assert np.abs(result.grads["fc.weight"][:, third]).min() > 0
