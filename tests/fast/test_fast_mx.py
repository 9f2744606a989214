"""MX quantisation in every backend against the oracle, bit for bit: all of bfloat16 under every block exponent."""

import numpy as np
import pytest
import torch

from draftconf.fast import mx
from draftconf.fast.kernels import build
from draftconf.reference import mx as oracle

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NO_COMPILER = build.problem()
native = pytest.param("native", marks=pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER[:200]))
every_backend = pytest.mark.parametrize("name", ["eager", native])
every_format = pytest.mark.parametrize("form", mx.FORMATS)
every_rule = pytest.mark.parametrize("rule", mx.RULES)
INTEGERS = {F32: torch.int32, BF16: torch.int16}


def assert_same(actual, wanted):
    """Equal bit for bit, except that one NaN is as good as another."""
    nan = wanted.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = INTEGERS[wanted.dtype]
    assert torch.equal(actual.masked_fill(nan, 0).view(bits), wanted.masked_fill(nan, 0).view(bits))


def of_bits(bits, dtype=BF16):
    return torch.from_numpy(bits.astype(np.int16)).view(BF16).to(dtype)


def blocks_of_exponent(field: int) -> torch.Tensor:
    """All bfloat16 values whose exponent field is at most that, in blocks that each start with the largest. [n, 32]."""
    largest = field << 7 | 0x7F
    magnitudes = np.arange(largest + 1)
    values = np.concatenate([magnitudes, magnitudes | 0x8000])
    values = np.pad(values, (0, -len(values) % 31)).reshape(-1, 31)
    return of_bits(np.concatenate([np.full((len(values), 1), largest), values], 1))


def check_against_oracle(x, form, rule, name):
    """Scales, codes, packed codes, fake-quantised values of x [..., 32n]; the codes of NaN blocks are not compared."""
    scales, codes = mx.quantize(x, form, rule, backend=name)
    want_scales, want_codes = oracle.quantize(x.double().numpy(), form, rule)
    assert np.array_equal(scales.numpy(), want_scales)
    finite = (want_scales != 255).repeat(32, -1)
    assert np.array_equal(codes.numpy()[finite], want_codes[finite])
    wanted = torch.from_numpy(oracle.dequantize(want_scales, want_codes, form)).to(x.dtype)
    assert_same(mx.fake_quantize(x, form, rule, backend=name), wanted)


@every_format
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("name", [native])
def test_every_bfloat16_value_under_every_block_exponent(name, part, form):
    """Rule floor: which grid point a value goes to depends on the scale alone, so the other rules add nothing here."""
    for field in range(part, 255, 8):
        check_against_oracle(blocks_of_exponent(field), form, "floor", name)


@every_format
@every_rule
@every_backend
def test_every_bfloat16_value_as_the_largest_of_its_block(name, rule, form):
    for sign in (0, 0x8000):
        x = torch.zeros(0x8000, 32, dtype=BF16)
        x[:, 5] = of_bits(np.arange(0x8000) | sign)
        x[:, 6] = x[:, 5] / 2
        check_against_oracle(x if name == "native" else x[::31], form, rule, name)


@every_format
@every_rule
@every_backend
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_random_bits_and_random_scales(name, dtype, rule, form):
    g = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 4, 96), generator=g, dtype=torch.int32)
    check_against_oracle(bits.view(F32).to(dtype), form, rule, name)
    scaled = torch.randn(64, 4, 96, generator=g) * torch.exp2(torch.randint(-140, 120, (64, 4, 1), generator=g).float())
    check_against_oracle(scaled.to(dtype), form, rule, name)


@every_format
@every_rule
@every_backend
def test_float32_at_the_thresholds_of_the_rules_and_the_ties_of_the_grid(name, rule, form):
    element = mx.FORMATS[form]
    thresholds = [1, 2 - 0.5 ** (element.mantissa_bits + 1), element.largest_significand, 2]
    near = [np.nextafter(np.float32(t), np.float32(to)) for t in thresholds for to in (0, t, 9)]
    grid = mx.grid(element)[: element.largest + 1].numpy()
    ties = (grid[1:] + grid[:-1]) / 2
    ties = np.concatenate([ties, np.nextafter(ties.astype(np.float32), 0), np.nextafter(ties.astype(np.float32), 1e9)])
    for power in (-126, -3, 0, 100):
        tops = np.array(near, np.float32) * np.float32(2.0**power)
        x = np.zeros((len(tops), -(-len(ties) // 31), 32), np.float32)
        x[..., 1:] = np.resize(ties, (x.shape[1], 31)) * 2.0 ** (power - element.max_exponent)
        x[..., 1:] = np.where(np.abs(x[..., 1:]) <= tops[:, None, None], x[..., 1:], 0)
        x[..., 0] = tops[:, None]
        check_against_oracle(torch.from_numpy(x.reshape(len(tops), -1)), form, rule, name)


@every_format
@every_backend
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_code_under_every_scale(name, dtype, form):
    count = 1 << mx.FORMATS[form].bits
    codes = torch.arange(count, dtype=torch.uint8).repeat(256, 32 // min(count, 32))  # [256, 32 or 256]
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, codes.shape[1] // 32)
    wanted = torch.from_numpy(oracle.dequantize(scales.numpy(), codes.numpy(), form)).to(dtype)
    assert_same(mx.dequantize(scales, codes, form, dtype, backend=name), wanted)
    out = torch.empty(codes.shape, dtype=dtype)
    assert mx.dequantize(scales, codes, form, out=out, backend=name) is out
    assert_same(out, wanted)


@every_backend
def test_packed_codes(name):
    x = torch.randn(3, 5, 64)
    scales, codes = mx.quantize(x, "mxfp4", backend=name)
    same, packed = mx.quantize(x, "mxfp4", packed=True, backend=name)
    assert torch.equal(scales, same)
    assert torch.equal(packed, mx.pack(codes))
    assert np.array_equal(packed.numpy(), oracle.pack(codes.numpy()))
    values = mx.dequantize(scales, packed, "mxfp4", packed=True, backend=name)
    assert_same(values, mx.dequantize(scales, codes, "mxfp4", backend=name))
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    one = torch.full((16, 1), 127, dtype=torch.uint8)
    wanted = mx.dequantize(one, mx.unpack(every), "mxfp4", backend="eager")
    assert_same(mx.dequantize(one, every, "mxfp4", packed=True, backend=name), wanted)


@every_format
@every_backend
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("source", ["stored", "bfloat16"])
def test_fake_quantize_and_its_straight_through_mask(name, source, dtype, form):
    g = torch.Generator().manual_seed(4)
    x = (torch.randn(7, 96, generator=g) * torch.exp2(torch.randint(-20, 20, (7, 1), generator=g).float())).to(dtype)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    value = x.to(BF16) if source == "bfloat16" else x
    scales, codes = oracle.quantize(value.double().numpy(), form)
    wanted = torch.from_numpy(oracle.dequantize(scales, codes, form)).to(dtype)
    assert_same(mx.fake_quantize(x, form, source=source, backend=name), wanted)
    out = x.clone()
    assert mx.fake_quantize(out, form, source=source, out=out, backend=name) is out  # in place
    assert_same(out, wanted)
    for ste in ("identity", "clipped"):
        leaf = x.clone().requires_grad_(True)
        mx.fake_quantize(leaf, form, "floor", source, ste, backend=name).backward(torch.ones_like(x))
        kept = oracle.fake_quantize_backward(x.double().numpy(), form, "floor", source, ste, np.ones(x.shape))
        assert np.array_equal(leaf.grad.double().numpy(), kept)
    mask = mx.straight_through_mask(x, form, source=source, backend=name)
    assert np.array_equal(mask.numpy(), kept != 0)
    assert not mask.all()


@every_backend
def test_layouts_and_empty_arrays(name):
    x = torch.randn(64, 6).mT  # values that lie apart
    assert_same(mx.fake_quantize(x, "mxfp4", backend=name), mx.fake_quantize(x.contiguous(), "mxfp4", backend=name))
    assert mx.quantize(x, "mxfp4", backend=name)[1].shape == (6, 64)
    empty = mx.quantize(torch.zeros(0, 64), "mxfp4", packed=True, backend=name)
    assert [tuple(part.shape) for part in empty] == [(0, 2), (0, 32)]
    wide = torch.randn(2, 64, dtype=F64)
    assert torch.equal(mx.fake_quantize(wide, "mxfp4", backend=name), mx.fake_quantize(wide, "mxfp4", backend="eager"))


@every_backend
def test_what_does_not_fit_is_refused_by_name(name):
    x = torch.randn(2, 64)
    for wrong, message in (
        (lambda: mx.quantize(x[:, :40], "mxfp4", backend=name), "last axis has 40 values"),
        (lambda: mx.fake_quantize(x[:, :40], "mxfp4", backend=name), "last axis has 40 values"),
        (lambda: mx.quantize(x, "mxfp6", backend=name), "format is 'mxfp6'"),
        (lambda: mx.quantize(x, "mxfp4", "round", backend=name), "rule is 'round'"),
        (lambda: mx.fake_quantize(x, "mxfp4", "round", backend=name), "rule is 'round'"),
        (lambda: mx.fake_quantize(x, "mxfp4", out=torch.empty(64, 2).mT, backend=name), "out has shape"),
        (lambda: mx.fake_quantize(x, "mxfp4", out=torch.empty(2, 64, dtype=BF16), backend=name), "out is"),
        (lambda: mx.quantize(x, "mxfp8_e4m3", packed=True, backend=name), "packed"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    scales, codes = mx.quantize(x, "mxfp4", backend=name)
    with pytest.raises(ValueError, match="scales have shape"):
        mx.dequantize(scales[:, :1], codes, "mxfp4", backend=name)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own, while tracing
def test_a_step_compiles_into_one_graph():
    x = torch.randn(4, 64, requires_grad=True)
    compiled = torch.compile(mx.fake_quantize, fullgraph=True, backend="aot_eager")(x, "mxfp4")
    assert_same(compiled.detach(), mx.fake_quantize(x, "mxfp4").detach())
    compiled.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
