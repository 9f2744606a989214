"""The Triton kernels: on a GPU where there is one, else on the CPU through Triton's interpreter (make kernels-test)."""

import os

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton", reason="triton is not installed: make kernels-test installs it beside")

from draftconf.fast import linear_loss, loss, mx  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
F32, BF16 = torch.float32, torch.bfloat16
INTEGERS = {F32: torch.int32, BF16: torch.int16}
# The interpreter's own: numbers that overflow on purpose, and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def pair(rows, size, draft=F32, target=F32, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = 3 * torch.randn(rows, size, generator=g)
    z = y + torch.randn(rows, size, generator=g)
    return z.to(DEVICE, draft), y.to(DEVICE, target)


def assert_same(actual, wanted):
    nan = wanted.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = INTEGERS[wanted.dtype]
    assert torch.equal(actual.masked_fill(nan, 0).view(bits), wanted.masked_fill(nan, 0).view(bits))


@pytest.mark.parametrize(("draft", "target"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("size", [1, 5, 97, 4096, 5000])
def test_loss_and_gradient(size, draft, target):
    (z, y), weight = pair(4, size, draft, target), torch.rand(4, device=DEVICE)
    value, gradient = loss.lk_loss_with_gradient(z, y, weight, out=torch.empty_like(z, dtype=F32), backend="triton")
    exact = z.double().requires_grad_(True)
    losses = loss.lk_loss(exact, y.double())
    (losses * weight).sum().backward()
    torch.testing.assert_close(value.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_equal_logits_give_a_gradient_of_exact_zeros():
    z, _ = pair(3, 5000)
    _, gradient = loss.lk_loss_with_gradient(z, z.clone(), torch.ones(3, device=DEVICE), backend="triton")
    assert torch.count_nonzero(gradient) == 0


def test_statistics_apart_from_the_gradient_in_place_and_by_row():
    (z, y), weight = pair(6, 300), torch.rand(6, device=DEVICE)
    value, gradient = loss.lk_loss_with_gradient(z, y, weight, backend="triton")
    leaf = z.clone().requires_grad_(True)
    losses = loss.lk_loss(leaf, y, backend="triton")
    losses.backward(weight)
    assert torch.equal(losses, value)
    assert torch.equal(leaf.grad, gradient)
    rows = torch.tensor([5, 4, 3, 2, 1, 0], device=DEVICE)
    _, again = loss.lk_loss_with_gradient(z, y[rows], weight, target_rows=rows, out=z, backend="triton")
    assert torch.equal(again, gradient)


def test_weight_zero_nan_and_acceptance_that_underflows():
    z, y = pair(4, 333)
    z[1, 7] = y[2, 300] = torch.nan
    z[3] = torch.nan
    weight = torch.tensor([1.0, 1, 1, 0], device=DEVICE)
    value, gradient = loss.lk_loss_with_gradient(z, y, weight, backend="triton")
    assert value.isnan().tolist() == [False, True, True, True]
    assert gradient.isnan().any(1).tolist() == [False, True, True, False]
    far = torch.zeros(2, 1, 1000, device=DEVICE)
    far[0, 0, 0] = far[1, 0, 1] = 800.0
    value, gradient = loss.lk_loss_with_gradient(*far, weight[:1], backend="triton")
    assert value.item() == pytest.approx(793.0922447, rel=1e-6)
    assert gradient[0, 0].item() == pytest.approx(1e-3, rel=1e-3)


def test_the_loss_with_the_head():
    hidden, head = torch.randn(3, 9, 8, device=DEVICE), torch.randn(50, 8, device=DEVICE)
    target, weights = torch.randn(9, 50, device=DEVICE), torch.rand(3, 9, device=DEVICE)
    for k in range(3):
        weights[k, 9 - k :] = 0
    losses, d_hidden = linear_loss.linear_lk_loss(hidden, target, head, weights, backend="triton")
    want, d_want = linear_loss.linear_lk_loss(hidden, target, head, weights, backend="eager")
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d_hidden, d_want, rtol=1e-4, atol=1e-6)


def values(dtype):
    """Random bits, and blocks of very different scales."""
    g = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31 - 1, (9, 64), generator=g, dtype=torch.int32).view(F32)
    scaled = torch.randn(9, 64, generator=g) * torch.exp2(torch.randint(-140, 120, (9, 1), generator=g).float())
    return torch.cat([bits, scaled]).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("form", mx.FORMATS)
def test_mx_gives_the_bytes_of_plain_pytorch(form, rule, dtype):
    x = values(dtype)
    scales, codes = mx.quantize(x, form, rule, backend="triton")
    want_scales, want_codes = mx.quantize(x, form, rule, backend="eager")
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes, want_codes)
    for source in ("stored", "bfloat16"):
        wanted = mx.fake_quantize(x, form, rule, source, backend="eager")
        assert_same(mx.fake_quantize(x, form, rule, source, backend="triton"), wanted)
        mask = mx.straight_through_mask(x, form, rule, source, backend="triton")
        assert torch.equal(mask, mx.straight_through_mask(x, form, rule, source, backend="eager"))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", mx.FORMATS)
def test_every_code_under_every_scale(form, dtype):
    count = 1 << mx.FORMATS[form].bits
    codes = torch.arange(count, dtype=torch.uint8, device=DEVICE).repeat(256, 32 // min(count, 32))
    scales = torch.arange(256, dtype=torch.uint8, device=DEVICE)[:, None].repeat(1, codes.shape[1] // 32)
    wanted = mx.dequantize(scales, codes, form, dtype, backend="eager")
    assert_same(mx.dequantize(scales, codes, form, dtype, backend="triton"), wanted)
    if form == "mxfp4":
        assert_same(mx.dequantize(scales, mx.pack(codes), form, dtype, packed=True, backend="triton"), wanted)


def test_packed_codes():
    x = values(F32)
    _, packed = mx.quantize(x, "mxfp4", packed=True, backend="triton")
    assert torch.equal(packed, mx.pack(mx.quantize(x, "mxfp4", backend="eager")[1]))
