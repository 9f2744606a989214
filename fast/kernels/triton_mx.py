"""MX quantisation in Triton: what mx.cpp does, a program for some blocks of 32 (spec.md section 6)."""

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 32  # of 32 values, to a program
INFINITE, MAGNITUDE, NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FC00000)
# Of each format, by its number: mantissa bits, least exponent, largest exponent, index of the largest magnitude, bits.
ELEMENTS = ((1, 0, 2, 0x7, 4), (3, -6, 8, 0x7E, 8), (2, -14, 15, 0x7B, 8))


def mx_fake_quantize(x: Tensor, format: int, carry: int, round_first: bool, out: Tensor, inside: Tensor | None) -> None:
    """See ``fast.kernels.native``; x, ``out`` and ``inside`` are contiguous."""
    n = x.numel() // 32
    has_mask = inside is not None
    _fake_quantize_kernel[(triton.cdiv(n, BLOCKS),)](
        x, out, inside if has_mask else out, n, carry, *ELEMENTS[format], round_first, has_mask, BLOCKS
    )


def mx_quantize(x: Tensor, format: int, carry: int, packed: bool, scales: Tensor, codes: Tensor) -> None:
    n = x.numel() // 32
    _quantize_kernel[(triton.cdiv(n, BLOCKS),)](x, scales, codes, n, carry, *ELEMENTS[format], packed, BLOCKS)


def mx_dequantize(scales: Tensor, codes: Tensor, packed: bool, format: int, out: Tensor) -> None:
    n = scales.numel()
    _dequantize_kernel[(triton.cdiv(n, BLOCKS),)](scales, codes, out, n, *ELEMENTS[format], packed, BLOCKS)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as_bfloat16(bits):
    """The bits of a float32 rounded to bfloat16, half to even."""
    magnitude = bits & MAGNITUDE
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & 0x7FFF0000
    return tl.where(magnitude > INFINITE, NAN, rounded) | (bits & ~MAGNITUDE)


@triton.jit
def _load(x, offsets, there):
    """The bits of float32 or bfloat16 values, as float32. By hand: Triton's interpreter flushes and truncates."""
    if x.dtype.element_ty == tl.bfloat16:
        return tl.load(x.to(tl.pointer_type(tl.int16), bitcast=True) + offsets, mask=there, other=0).to(tl.int32) << 16
    else:
        return _bits(tl.load(x + offsets, mask=there, other=0.0))


@triton.jit
def _store(out, offsets, bits, there):
    """The inverse of ``_load``, rounding."""
    if out.dtype.element_ty == tl.bfloat16:
        half = (_as_bfloat16(bits) >> 16).to(tl.int16)
        tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + offsets, half, mask=there)
    else:
        tl.store(out + offsets, _float(bits), mask=there)


@triton.jit
def _power_of_two(code):
    """2^(code - 127) for code 0 to 254, NaN for 255."""
    bits = tl.where(code == 0, 1 << 22, code << 23)
    return _float(tl.where(code == 255, NAN, bits))


@triton.jit
def _scale_code(magnitude, carry, largest_exponent: tl.constexpr):
    """Scale codes [N] of the bits of magnitudes [N, 32]."""
    amax = tl.max(magnitude, 1)
    return tl.where(amax >= INFINITE, 255, tl.maximum(((amax + carry) >> 23) - largest_exponent, 0))


@triton.jit
def _inverse(code):
    """2^(127 - code), anything for 255. [N] -> [N, 1]."""
    return _float(tl.where(code == 255, 0, 254 - code) << 23)[:, None]


@triton.jit
def _round(
    magnitude, inverse, mantissa_bits: tl.constexpr, least_exponent: tl.constexpr, largest_exponent: tl.constexpr,
    largest_index: tl.constexpr,
):  # fmt: skip
    """Value over scale on the grid, and its index. The sum with ``magic`` = 1.5 x 2^k counts grid steps in its bits."""
    significand: tl.constexpr = (1 << mantissa_bits) + (largest_index & ((1 << mantissa_bits) - 1))
    largest: tl.constexpr = significand * 2.0 ** (largest_exponent - mantissa_bits)
    least_field: tl.constexpr = (least_exponent + 127) << 23
    y = tl.minimum(_float(magnitude) * inverse, largest)
    field = tl.maximum(_bits(y) & INFINITE, least_field)
    magic = field + (((23 - mantissa_bits) << 23) | (1 << 22))
    total = y + _float(magic)
    index = ((field - least_field) >> (23 - mantissa_bits)) + (_bits(total) - magic)
    return total - _float(magic), index


@triton.jit
def _offsets(BLOCKS: tl.constexpr):
    """Numbers of this program's blocks [N], and of their values [N, 32]."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    return block, block[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _fake_quantize_kernel(
    x, out, inside, n, carry, mantissa_bits: tl.constexpr, least_exponent: tl.constexpr,
    largest_exponent: tl.constexpr, largest_index: tl.constexpr, bits: tl.constexpr, round_first: tl.constexpr,
    has_mask: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, offsets = _offsets(BLOCKS)
    there = (block < n)[:, None]
    v = _load(x, offsets, there)
    if round_first:
        v = _as_bfloat16(v)
    magnitude = v & MAGNITUDE
    code = _scale_code(magnitude, carry, largest_exponent)
    inverse = _inverse(code)
    y, _ = _round(magnitude, inverse, mantissa_bits, least_exponent, largest_exponent, largest_index)
    y = _bits(y * _power_of_two(code)[:, None]) | (v & ~MAGNITUDE)
    _store(out, offsets, y, there)
    if has_mask:
        significand: tl.constexpr = (1 << mantissa_bits) + (largest_index & ((1 << mantissa_bits) - 1))
        largest: tl.constexpr = significand * 2.0 ** (largest_exponent - mantissa_bits)
        kept = tl.where((code == 255)[:, None], magnitude < INFINITE, _float(magnitude) * inverse <= largest)
        tl.store(inside + offsets, kept.to(tl.uint8), mask=there)


@triton.jit
def _quantize_kernel(
    x, scales, codes, n, carry, mantissa_bits: tl.constexpr, least_exponent: tl.constexpr,
    largest_exponent: tl.constexpr, largest_index: tl.constexpr, bits: tl.constexpr, packed: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block, offsets = _offsets(BLOCKS)
    there = (block < n)[:, None]
    v = _load(x, offsets, there)
    magnitude = v & MAGNITUDE
    code = _scale_code(magnitude, carry, largest_exponent)
    _, index = _round(magnitude, _inverse(code), mantissa_bits, least_exponent, largest_exponent, largest_index)
    index |= (v >> (32 - bits)) & (1 << (bits - 1))
    index = tl.where((code == 255)[:, None], 0, index)
    tl.store(scales + block, code.to(tl.uint8), mask=block < n)
    if packed:
        low, high = tl.split(tl.reshape(index, [BLOCKS, 16, 2]))
        pairs = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(codes + pairs, (low | (high << 4)).to(tl.uint8), mask=there)
    else:
        tl.store(codes + offsets, index.to(tl.uint8), mask=there)


@triton.jit
def _decode(
    code, mantissa_bits: tl.constexpr, least_exponent: tl.constexpr, largest_index: tl.constexpr, bits: tl.constexpr
):
    """Values of codes."""
    index = code & ((1 << (bits - 1)) - 1)
    step: tl.constexpr = 2.0 ** (least_exponent - mantissa_bits)
    normal = (index << (23 - mantissa_bits)) + ((least_exponent + 126) << 23)
    value = tl.where(index < (1 << mantissa_bits), _bits(index.to(tl.float32) * step), normal)
    value = tl.where(index > largest_index, NAN, value)
    if mantissa_bits == 2:  # E5M2 has an infinity
        value = tl.where(index == largest_index + 1, INFINITE, value)
    return _float(value | ((code >> (bits - 1)) << 31))


@triton.jit
def _dequantize_kernel(
    scales, codes, out, n, mantissa_bits: tl.constexpr, least_exponent: tl.constexpr,
    largest_exponent: tl.constexpr, largest_index: tl.constexpr, bits: tl.constexpr, packed: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block, offsets = _offsets(BLOCKS)
    there = (block < n)[:, None]
    scale = _power_of_two(tl.load(scales + block, mask=block < n, other=0).to(tl.int32))[:, None]
    if packed:
        code = tl.load(codes + offsets // 2, mask=there, other=0).to(tl.int32)
        code = (code >> ((offsets % 2) * 4).to(tl.int32)) & 0xF
    else:
        code = tl.load(codes + offsets, mask=there, other=0).to(tl.int32)
    value = _decode(code, mantissa_bits, least_exponent, largest_index, bits) * scale
    _store(out, offsets, _bits(value), there)
