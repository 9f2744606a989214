"""MX quantisation against exact rational arithmetic (spec.md section 6; OCP MX v1.0)."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import GRIDS, RULES, SIGN_BIT, assert_same_bits, exact_block, exact_exponent
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from draftconf.reference import mx
from draftconf.reference.formats import round_to

FORMS = list(GRIDS)
CASES = json.loads((Path(__file__).parents[1] / "data" / "mx_blocks.json").read_text())["blocks"]
BITS = np.array([[int(bits, 16) for bits in block["bits"]] for block in CASES], np.uint32)
VALUES = BITS.view(np.float32)
FINITE = np.isfinite(VALUES).all(axis=1)
NAMES = {"mxfp4": "mxfp4", "mxfp8": "mxfp8_e4m3"}

every_form = pytest.mark.parametrize("form", FORMS)
every_rule = pytest.mark.parametrize("rule", RULES)
every_named_form = pytest.mark.parametrize(("name", "form"), NAMES.items())


def exact_value(code: int, scale: int, form: str):
    """The rational value of a code-scale pair; a float where it is NaN or an infinity."""
    magnitude, negative = code % SIGN_BIT[form], code >= SIGN_BIT[form]
    if scale == 255:
        return np.nan
    if magnitude >= len(GRIDS[form]):
        infinite = form == "mxfp8_e5m2" and magnitude == len(GRIDS[form])
        return (-np.inf if negative else np.inf) if infinite else np.nan
    value = GRIDS[form][magnitude] * Fraction(2) ** (scale - 127)
    return -value if negative else value


@every_form
def test_every_code_scale_pair_decodes_to_its_exact_rational(form):
    count = 2 * SIGN_BIT[form]
    codes = np.tile(np.arange(count, dtype=np.uint8), (256, 1)).repeat(32, axis=1)  # one block a pair
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(count, axis=1)
    values = mx.dequantize(scales, codes, form).reshape(256, count, 32)
    assert_same_bits(values, values[..., :1].repeat(32, axis=-1))
    for scale, code in np.ndindex(256, count):
        got, want = values[scale, code, 0], exact_value(code, scale, form)
        if isinstance(want, Fraction):
            assert Fraction(got) == want, (scale, code)
            assert np.signbit(got) == (code >= SIGN_BIT[form]), (scale, code)
        else:
            assert_same_bits(abs(got), abs(np.float64(want)), (scale, code))
            assert np.isnan(want) or got == want


@every_rule
@every_named_form
def test_scales_codes_and_packed_bytes_equal_the_case_file(name, form, rule):
    scales, codes = mx.quantize(VALUES, form, rule)
    digits = 1 if form == "mxfp4" else 2
    for block, scale, code in zip(CASES, scales[:, 0], codes, strict=True):
        want = block[name][rule.upper()]
        assert scale == want["scale"], block["id"]
        if want["codes"] is not None:
            assert "".join(f"{c:0{digits}x}" for c in code) == want["codes"], block["id"]
        if want.get("packed_low_nibble_first"):
            assert mx.pack(code).tobytes().hex() == want["packed_low_nibble_first"], block["id"]
            assert_same_bits(mx.unpack(mx.pack(code)), code)


def test_the_case_file_leans_on_every_policy_and_its_don_t_cares_read_as_nan():
    assert {policy for block in CASES for policy in block["policies"]} == {"P1", "P2", "P3", "P5"}
    unsaid = np.array([block["mxfp4"]["FLOOR"]["codes"] is None for block in CASES])
    assert unsaid.tolist() == (~FINITE).tolist()
    for form in FORMS:
        assert np.isnan(mx.fake_quantize(VALUES[unsaid], form)).all()


@every_rule
@every_named_form
def test_dequantised_blocks_leave_float32_exactly_where_the_case_file_says(name, form, rule):
    beyond = (np.abs(mx.fake_quantize(VALUES, form, rule)) > np.finfo(np.float32).max).any(axis=1)  # false of NaN
    assert beyond.tolist() == [block[name][rule.upper()].get("dequant_overflows_float32", False) for block in CASES]


@every_named_form
def test_rounding_to_bfloat16_first_changes_exactly_the_rules_the_case_file_lists(name, form):
    rounded = round_to(VALUES, "bfloat16")
    changed = [set() for _ in CASES]
    for rule in RULES:
        (scales, codes), (other_scales, other_codes) = mx.quantize(VALUES, form, rule), mx.quantize(rounded, form, rule)
        for i in np.flatnonzero((scales != other_scales).any(axis=1) | (codes != other_codes).any(axis=1)):
            changed[i].add(rule.upper())
    listed = [set(block.get("via_bfloat16_changes", {}).get(name, [])) for block in CASES]
    stays_finite = np.isfinite(rounded).all(axis=1)
    assert [c for c, ok in zip(changed, stays_finite, strict=True) if ok] == [
        c for c, ok in zip(listed, stays_finite, strict=True) if ok
    ]
    assert sum(map(bool, listed)) > 100


def float32(bits) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def block_maxima() -> np.ndarray:
    """All bfloat16 values of the binade of 1, some of every other binade, and both float32 neighbours of each."""
    binade = np.arange(127 << 7, 128 << 7)  # bfloat16 bit patterns
    thresholds = np.array([0, 1, 63, 64, 65, 95, 96, 97, 119, 120, 121, 127])  # significands 1, 1.5, 1.75, 1.9375
    others = (np.arange(0, 255)[:, None] * 128 + thresholds).ravel()
    bits = np.concatenate([binade, others]).astype(np.uint32) << 16
    bits = np.unique(np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1]))
    return bits[bits > 0]


MAXIMA = float32(block_maxima())


@every_rule
@every_form
def test_scale_of_every_bfloat16_of_a_binade_and_its_neighbours_is_the_exact_choice(form, rule):
    blocks = np.zeros((len(MAXIMA), 32), np.float32)
    rows = np.arange(len(MAXIMA))
    blocks[rows, (rows + 1) % 32] = MAXIMA / 2  # never the maximum
    blocks[rows, rows % 32] = MAXIMA * np.where(rows % 2, -1, 1)
    scales, _ = mx.quantize(blocks, form, rule)
    want = [exact_exponent(Fraction(float(x)), form, rule) + 127 for x in MAXIMA]
    assert scales[:, 0].tolist() == want


def test_the_maxima_hold_a_whole_binade_with_both_neighbours():
    binade = MAXIMA[(MAXIMA >= 1) & (MAXIMA < 2)]
    exact = binade[binade.view(np.uint32) % 65536 == 0]
    assert len(exact) == 128
    assert {*np.nextafter(exact, np.float32(3)), *np.nextafter(exact, np.float32(0))} <= {*MAXIMA}


bit_patterns = st.integers(0, 2**32 - 1)
nearby = st.integers(0, 2**31 - 1).map(lambda r: (r % 2) << 31 | (120 + r % 15) << 23 | (r >> 4) % 2**23)
coarse = st.integers(0, 2**31 - 1).map(lambda r: (r % 2) << 31 | (124 + r % 5) << 23 | ((r >> 4) % 32) << 18)  # ties
blocks_of_bits = st.one_of(
    *(hnp.arrays(np.uint32, 32, elements=e, fill=st.nothing()) for e in (bit_patterns, nearby, coarse))
)


@every_form
@settings(max_examples=300)
@given(bits=blocks_of_bits)
def test_generated_float32_blocks_equal_the_exact_quantiser_under_all_rules(form, bits):
    block = float32(bits)
    for rule in RULES:
        scales, codes = mx.quantize(block, form, rule)
        if np.isfinite(block).all():
            scale, want = exact_block(block, form, rule)
            assert scales.tolist() == [scale], rule
            assert codes.tolist() == want, rule
        else:
            assert scales.tolist() == [255], rule
            assert np.isnan(mx.dequantize(scales, codes, form)).all()


@every_form
@given(bits=hnp.arrays(np.uint32, 32, elements=nearby, fill=st.nothing()), power=st.integers(-80, 80))
def test_scaling_by_a_power_of_two_shifts_the_scale_and_keeps_every_code(form, bits, power):
    block = float32(bits).astype(float)
    for rule in RULES:
        scales, codes = mx.quantize(block, form, rule)
        moved_scales, moved_codes = mx.quantize(np.ldexp(block, power), form, rule)
        assert moved_scales.astype(int).tolist() == (scales.astype(int) + power).tolist()
        assert_same_bits(moved_codes, codes)


@every_rule
@every_form
def test_quantising_a_dequantised_block_again_returns_the_same_values(form, rule):
    values = np.random.default_rng(0).normal(0, 1, (50, 64)) * np.logspace(-20, 20, 50)[:, None]
    once = mx.fake_quantize(values, form, rule)
    assert_same_bits(mx.fake_quantize(once, form, rule), once)


@every_form
def test_blocks_lie_along_the_last_axis_and_do_not_touch_each_other(form):
    values = np.random.default_rng(1).normal(0, 1, (2, 3, 96)) * np.repeat([1.0, 1e-6, 1e6], 32)
    scales, codes = mx.quantize(values, form)
    assert scales.shape == (2, 3, 3)
    for at in np.ndindex(2, 3, 3):
        alone = mx.quantize(values[at[:2]][32 * at[2] : 32 * at[2] + 32], form)
        assert scales[at] == alone[0][0]
        assert_same_bits(codes[at[:2]][32 * at[2] : 32 * at[2] + 32], alone[1])


@every_form
def test_signs_of_zero_and_of_what_rounds_to_zero_are_kept(form):
    block = np.zeros(32)
    block[:4] = -0.0, 1.0, -1e-30, 1e-30
    _, codes = mx.quantize(block, form)
    assert (codes[[0, 2, 3]] == [SIGN_BIT[form], SIGN_BIT[form], 0]).all()
    assert np.signbit(mx.fake_quantize(-np.zeros(32), form)).all()


def test_all_256_packed_bytes_unpack_and_pack_to_themselves_low_nibble_first():
    packed = np.arange(256, dtype=np.uint8)
    codes = mx.unpack(packed)
    assert_same_bits(codes[0::2], packed % 16)
    assert_same_bits(codes[1::2], packed // 16)
    assert_same_bits(mx.pack(codes), packed)


@every_form
@every_rule
def test_straight_through_gradient_is_the_identity_or_zero_strictly_beyond_the_largest_element(form, rule):
    rng = np.random.default_rng(2)
    x = rng.normal(0, 1, (40, 32)) * np.exp(rng.normal(0, 5, (40, 1)))
    x[:4], x[4, 0] = x[:4] * 0.1, 0.0
    limits = np.array([float(GRIDS[form][-1] * Fraction(2) ** (exact_block(row, form, rule)[0] - 127)) for row in x])
    x[0, 0], x[1, 0] = limits[0], np.nextafter(limits[1], np.inf)  # on the limit and just beyond, where the rule allows
    limits = np.array([float(GRIDS[form][-1] * Fraction(2) ** (exact_block(row, form, rule)[0] - 127)) for row in x])
    d_y = rng.normal(0, 1, x.shape)
    straight = mx.straight_through(form, rule, "stored", "identity").backward(x, None, d_y)[0]
    clipped = mx.straight_through(form, rule, "stored", "clipped").backward(x, None, d_y)[0]
    assert_same_bits(straight, d_y)
    assert_same_bits(clipped, np.where(np.abs(x) > limits[:, None], 0.0, d_y))
    assert (clipped == 0).any() == (rule in ("floor", "even"))  # the other rules never saturate


def test_source_bfloat16_is_a_double_rounding():
    block = np.zeros(32)
    block[:2] = 6.0, 2.5 + 2.0**-20  # rounds up to 3 directly, but is the tie 2.5 in bfloat16, which goes to 2
    assert mx.fake_quantize(block, "mxfp4")[1] == 3.0
    assert mx.fake_quantize(block, "mxfp4", source="bfloat16")[1] == 2.0
    assert_same_bits(mx.fake_quantize(VALUES[:20], "mxfp4", source="bfloat16"),
                     mx.fake_quantize(round_to(VALUES[:20], "bfloat16"), "mxfp4"))  # fmt: skip


def test_clipping_after_bfloat16_judges_the_rounded_value():
    block = np.zeros(32)
    block[:2] = 7.0, np.nextafter(6.0, 7.0)  # beyond 6 as stored, 6 itself in bfloat16
    d_y = np.ones(32)
    assert mx.fake_quantize_backward(block, "mxfp4", "floor", "stored", "clipped", d_y)[:2].tolist() == [0, 0]
    assert mx.fake_quantize_backward(block, "mxfp4", "floor", "bfloat16", "clipped", d_y)[:2].tolist() == [0, 1]


@given(x=st.floats(-1e40, 1e40) | st.floats(-1e-30, 1e-30))
def test_round_to_float32_and_float16_equals_the_hardware_cast(x):
    with np.errstate(over="ignore", under="ignore"):
        for name in ("float32", "float16"):
            assert_same_bits(round_to(np.array(x), name), np.asarray(np.dtype(name).type(x), np.float64))


@given(bits=st.integers(0, 2**31 - 1))
def test_round_to_bfloat16_is_the_nearest_with_ties_to_even(bits):
    x = float32(bits)
    if np.isfinite(x):
        upper = (bits >> 16) + (1 if bits % 65536 > 32768 or (bits % 65536 == 32768 and (bits >> 16) % 2) else 0)
        assert_same_bits(round_to(x, "bfloat16"), np.float64(float32(upper << 16)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mx.quantize(np.zeros(31), "mxfp4"), r"\(31,\).*multiple of 32"),
        (lambda: mx.quantize(np.array(1.0), "mxfp4"), "multiple of 32"),
        (lambda: mx.quantize(np.zeros(32), "mxfp6"), "'mxfp6'.*mxfp4"),
        (lambda: mx.quantize(np.zeros(32), "mxfp4", "nearest"), "'nearest'.*floor"),
        (lambda: mx.dequantize(np.zeros(1, np.uint8), np.full(32, 16, np.uint8), "mxfp4"), "16.*below 16"),
        (lambda: mx.pack(np.zeros(3, np.uint8)), "even length"),
    ],
)
def test_what_cannot_be_quantised_is_refused_with_what_was_wanted(call, words):
    with pytest.raises(ValueError, match=words):
        call()
