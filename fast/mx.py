"""MX quantisation: blocks of 32 values of the last axis under one power-of-two scale (spec.md section 6).

Exponents are read from the bits; no logarithm is taken. All steps are exact in the type they run in. Every function
gives the same bits in every backend (``fast.backend``).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import choose
from .kernels import native

BLOCK = 32
NAN_SCALE = 255  # E8M0's only NaN


class Format(NamedTuple):
    """An element type: a sign bit, then an index that grows with the magnitude."""

    mantissa_bits: int
    min_exponent: int  # of the smallest normal magnitude
    max_exponent: int  # of the largest magnitude ("emax")
    largest: int  # index of the largest finite magnitude
    bits: int

    @property
    def largest_significand(self) -> float:
        return 1 + (self.largest & ((1 << self.mantissa_bits) - 1)) / (1 << self.mantissa_bits)


FORMATS = {
    "mxfp4": Format(mantissa_bits=1, min_exponent=0, max_exponent=2, largest=0x7, bits=4),
    "mxfp8_e4m3": Format(mantissa_bits=3, min_exponent=-6, max_exponent=8, largest=0x7E, bits=8),
    "mxfp8_e5m2": Format(mantissa_bits=2, min_exponent=-14, max_exponent=15, largest=0x7B, bits=8),
}
RULES = ("floor", "ceil", "rceil", "even")


def element_format(name: str) -> Format:
    """The format of that name. Raises ValueError for another name."""
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}; wanted one of {', '.join(FORMATS)}")
    return FORMATS[name]


def quantize(
    x: Tensor, format: str, rule: str = "floor", *, packed: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Scales uint8 [..., n] and element codes uint8 [..., 32n] of x [..., 32n]; ``packed``: MXFP4 bytes [..., 16n].

    Round half to even, saturating; -0 stays -0. Raises ValueError for an unknown format or rule or a ragged last axis.
    A block that holds a NaN or an infinity gets scale 255 and codes 0.
    """
    element, backend = element_format(format), choose(backend, x)
    if packed and element.bits != 4:
        raise ValueError(f"packed is for mxfp4; format is {format!r}")
    if backend != "eager":
        return _quantize(x, element, rule, packed, backend)
    blocks = split_blocks(x)  # [..., n, 32]
    exponent, finite = scale_exponent(blocks.abs().amax(-1), element, rule)  # [..., n]
    scaled = blocks * power_of_two(-exponent, blocks.dtype).unsqueeze(-1)
    codes = encode(torch.where(finite.unsqueeze(-1), scaled, 0), element)  # [..., n, 32]
    scales = torch.where(finite, exponent + 127, NAN_SCALE).to(torch.uint8)
    return scales, pack(codes.flatten(-2)) if packed else codes.flatten(-2)


def _quantize(x: Tensor, element: Format, rule: str, packed: bool, backend: str) -> tuple[Tensor, Tensor]:
    check_blocks(x)
    *outer, size = x.shape
    scales = torch.empty((*outer, size // BLOCK), dtype=torch.uint8, device=x.device)
    codes = torch.empty((*outer, size // 2 if packed else size), dtype=torch.uint8, device=x.device)
    _kernels(backend).mx_quantize(x.detach().contiguous(), _index(element), carry(element, rule), packed, scales, codes)
    return scales, codes


def _kernels(backend: str):
    if backend == "triton":
        from .kernels import triton_mx

        return triton_mx
    return native


def _index(element: Format) -> int:
    """The number that the kernels know the format by."""
    return list(FORMATS.values()).index(element)


def carry(element: Format, rule: str) -> int:
    """What, added to a float32's bits, carries into its exponent exactly where the rule raises the scale."""
    check_rule(rule)
    largest = int((element.largest_significand - 1) * (1 << 23))
    rounds_up = (1 << 23) - (1 << (22 - element.mantissa_bits))
    return {"floor": 0, "ceil": (1 << 23) - 1, "rceil": (1 << 23) - 1 - largest, "even": (1 << 23) - rounds_up}[rule]


def check_rule(rule: str) -> None:
    """Raises ValueError for a rule that does not exist."""
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; wanted one of {', '.join(RULES)}")


def check_blocks(x: Tensor) -> None:
    """Raises ValueError for a last axis that does not end with a block."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"the last axis has {x.shape[-1]} values; wanted a multiple of the MX block, {BLOCK}")


def split_blocks(x: Tensor) -> Tensor:
    """x [..., 32n] -> [..., n, 32], bfloat16 widened to float32, which is exact."""
    check_blocks(x)
    x = x.float() if x.dtype == torch.bfloat16 else x
    return x.unflatten(-1, (-1, BLOCK))


def scale_exponent(amax: Tensor, element: Format, rule: str) -> tuple[Tensor, Tensor]:
    """Exponent of each block's scale, in [-127, 127], int32, and whether the block is finite. amax [..., n].

    With amax = s 2^E, 1 <= s < 2: E - emax, plus one where s passes the rule's threshold. A zero block gets -127.
    """
    check_rule(rule)
    finite = torch.isfinite(amax)
    half_significand, exponent = torch.frexp(torch.where(finite, amax, 0))
    significand = 2 * half_significand
    exponent = exponent - 1 - element.max_exponent
    if rule == "ceil":
        exponent = exponent + (significand > 1).int()
    elif rule == "rceil":
        exponent = exponent + (significand > element.largest_significand).int()
    elif rule == "even":  # the significand rounds up to 2 with the element's mantissa bits
        exponent = exponent + (significand >= 2 - 0.5 ** (element.mantissa_bits + 1)).int()
    exponent = torch.where(amax > 0, exponent, -127).clamp(-127, 127)
    return exponent, finite


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent exactly, from float64 bits; exponent int, within +-1022."""
    return ((exponent.long() + 1023) << 52).view(torch.float64).to(dtype)


def encode(scaled: Tensor, element: Format) -> Tensor:
    """Codes uint8 of finite values: nearest on the grid, half to even, saturating; the sign bit on top."""
    magnitude = scaled.abs()
    exponent = torch.frexp(magnitude).exponent - 1
    exponent = torch.where(magnitude > 0, exponent, element.min_exponent).clamp(min=element.min_exponent)
    steps = torch.round(magnitude * power_of_two(element.mantissa_bits - exponent, scaled.dtype))
    # A carry out of the mantissa moves the index into the next binade by itself.
    index = ((exponent - element.min_exponent) << element.mantissa_bits) + steps.int()
    sign = torch.signbit(scaled).int() << (element.bits - 1)
    return (index.clamp(max=element.largest) | sign).to(torch.uint8)


def grid(element: Format, device: torch.device | None = None) -> Tensor:
    """The value of every code, float64 [2^bits]; codes that are no number of the type give NaN (E5M2 also infinity)."""
    index = torch.arange(1 << (element.bits - 1), device=device)
    binade = index >> element.mantissa_bits
    mantissa = index & ((1 << element.mantissa_bits) - 1)
    steps = mantissa + torch.where(binade > 0, 1 << element.mantissa_bits, 0)
    exponent = element.min_exponent - element.mantissa_bits + (binade - 1).clamp(min=0)
    values = steps * power_of_two(exponent, torch.float64)
    values[element.largest + 1 :] = torch.nan
    if element == FORMATS["mxfp8_e5m2"]:
        values[element.largest + 1] = torch.inf
    return torch.cat([values, -values])


def dequantize(
    scales: Tensor,
    codes: Tensor,
    format: str,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Values [..., 32n] in ``dtype`` of scales uint8 [..., n] and codes uint8 [..., 32n]; scale 255 gives NaN.

    ``packed``: codes are MXFP4 bytes [..., 16n]. ``out`` [..., 32n], contiguous, is written to where it is given, in
    its own type.
    """
    element = element_format(format)
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if packed else 1))
    out = torch.empty(shape, dtype=dtype, device=codes.device) if out is None else check_out(out, shape)
    if scales.shape != (*shape[:-1], shape[-1] // BLOCK) or shape[-1] % BLOCK:
        raise ValueError(f"scales have shape {tuple(scales.shape)}, codes {tuple(codes.shape)}; wanted 32 to a scale")
    backend = choose(backend, out)
    if backend == "eager":
        return out.copy_(_dequantize(scales, unpack(codes) if packed else codes, element))
    _kernels(backend).mx_dequantize(scales.contiguous(), codes.contiguous(), packed, _index(element), out)
    return out


def _dequantize(scales: Tensor, codes: Tensor, element: Format) -> Tensor:
    scale = power_of_two(scales.int() - 127, torch.float64)
    scale = torch.where(scales == NAN_SCALE, torch.nan, scale).unsqueeze(-1)  # [..., n, 1]
    values = grid(element, codes.device)[codes.int()].unflatten(-1, (-1, BLOCK))  # [..., n, 32]
    return (values * scale).flatten(-2)


def check_out(out: Tensor, shape: tuple) -> Tensor:
    """``out``. Raises ValueError where it has another shape or is not contiguous."""
    if tuple(out.shape) != tuple(shape) or not out.is_contiguous():
        raise ValueError(f"out has shape {tuple(out.shape)}; wanted {tuple(shape)}, contiguous")
    return out


def pack(codes: Tensor) -> Tensor:
    """MXFP4 codes uint8 [..., 2n] -> bytes [..., n], the even index in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"the last axis has {codes.shape[-1]} codes; wanted an even number")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes uint8 [..., n] -> MXFP4 codes [..., 2n]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def fake_quantize(
    x: Tensor,
    format: str,
    rule: str = "floor",
    source: str = "stored",
    ste: str = "identity",
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """dequantize(quantize(x)) in the type of x, with a straight-through gradient.

    ``source`` "bfloat16" rounds x to bfloat16 first. ``ste`` "clipped" zeroes the gradient where the value that is
    quantised exceeds the largest magnitude times the scale, strictly. ``out``, of x's type and shape and contiguous, is
    written to and returned, without a gradient; it may be x.
    """
    if out is not None:
        if out.dtype != x.dtype:
            raise ValueError(f"out is {out.dtype}; wanted the type of x, {x.dtype}")
        with torch.no_grad():
            return _fake_quantize(x, format, rule, source, check_out(out, x.shape), None, backend)
    return _FakeQuantize.apply(x, format, rule, source, ste, backend)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, format, rule, source, ste, backend):
        inside = torch.empty(x.shape, dtype=torch.bool, device=x.device) if ste == "clipped" else None
        if inside is not None:
            ctx.save_for_backward(inside)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return _fake_quantize(x, format, rule, source, out, inside, backend)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y):
        d_x = torch.where(ctx.saved_tensors[0], d_y, 0) if ctx.saved_tensors else d_y
        return d_x, None, None, None, None, None


def _fake_quantize(x: Tensor, format: str, rule: str, source: str, out: Tensor, inside, backend) -> Tensor:
    """Writes ``out`` and, where given, ``inside``: the straight-through mask, bool, both of the shape of x."""
    element, chosen = element_format(format), choose(backend, x)
    if chosen == "eager":
        value = x.to(torch.bfloat16) if source == "bfloat16" else x
        scales, codes = quantize(value, format, rule, backend="eager")
        if inside is not None:
            inside.copy_(_inside(value, scales, element))
        return out.copy_(dequantize(scales, codes, format, x.dtype, backend="eager"))
    check_blocks(x)
    mask = None if inside is None else inside.view(torch.uint8)
    round_first = source == "bfloat16" and x.dtype != torch.bfloat16
    _kernels(chosen).mx_fake_quantize(x.contiguous(), _index(element), carry(element, rule), round_first, out, mask)
    return out


def straight_through_mask(
    x: Tensor, format: str, rule: str = "floor", source: str = "stored", *, backend: str | None = None
) -> Tensor:
    """Where x does not exceed its block's largest magnitude: what "clipped" lets the gradient through. bool, as x."""
    inside = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    unused = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _fake_quantize(x.detach(), format, rule, source, unused, inside, backend)
    return inside


def _inside(value: Tensor, scales: Tensor, element: Format) -> Tensor:
    largest = grid(element, value.device)[element.largest]
    limit = largest * power_of_two(scales.int() - 127, torch.float64)  # [..., n]
    return (value.unflatten(-1, (-1, BLOCK)).abs() <= limit.unsqueeze(-1)).flatten(-2)
