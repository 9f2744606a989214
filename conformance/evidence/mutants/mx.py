"""Wrong MX quantisers: scale rules, rounding, codes, straight-through gradients, and what is quantised at all."""

import torch

from draftconf.fast import moe, mx, unroll
from draftconf.reference.config import expert_name

from .core import STEPS, area, around, backward, both, during, patch

MUTANTS: list = []
mutant = area("mx", MUTANTS)
MOE = moe.MOE
FLOOR = "exponent = floor(log2 amax) - emax (spec.md 6)"
EVEN = "elements are rounded half to even and saturate (spec.md 6)"
STE = "straight-through: the cotangent passes (spec.md 6)"
OPERANDS = "dX = dY Wq, dWq = dY^T Xq (spec.md 6)"
ONLY = "only W1, W2, W3 of the routed experts and their inputs are quantised (report 4.1.4)"
QUANTISERS = ("mxfp4", "mxfp8")
ENCODE = {"methods": QUANTISERS}


# -- scales ------------------------------------------------------------------------------------------------------------


def rule(other):
    """Another scale rule wherever one is asked for."""
    return around(mx, "scale_exponent", lambda o, amax, element, _: o(amax, element, other))


def exponents(change):
    """``change(exponent, amax, element)`` before the clamp's result is used."""

    def wrapper(original, amax, element, name):
        exponent, finite = original(amax, element, name)
        return change(exponent, amax, element), finite

    return around(mx, "scale_exponent", wrapper)


@mutant("mx_input", "forward", 1, FLOOR, "M01: torchao #1643, #3428; aiter #3212; ml_dtypes #298")
def scales_by_ceil():
    return rule("ceil")


@mutant("mx_input", "forward", 1, FLOOR, "M01: torchao #1643 (bae41d174); trinity #694")
def scales_by_rceil():
    return rule("rceil")


@mutant("mx_input", "forward", 1, FLOOR, "M01: mlx #4353; FlyDSL #590")
def scales_by_even():
    return rule("even")


@mutant("expert_hidden", "forward", 1, "one rule for weights and activations", "M26: torchao #3686, #3522")
def scale_rule_not_forwarded_to_the_weights():
    return around(
        moe, "fake_quantize", lambda o, x, form, name, *args: o(x, form, "rceil" if form == "mxfp4" else name, *args)
    )


@mutant("mx_hidden", "forward", 1, "one rule for both inputs", "M26: torchao #3569")
def scale_rule_not_forwarded_to_the_hidden():
    return during(
        moe,
        "mx_hidden",
        lambda: around(moe, "fake_quantize", lambda o, x, form, name, *args: o(x, form, "ceil", *args)),
    )


@mutant("mx_input", "forward", 1, "mx_scale_rule: rceil", "M01", choices={"mx_scale_rule": "rceil"})
def floor_though_declared_rceil():
    return rule("floor")


@mutant(
    "mxfp4",
    "forward",
    None,
    "even: the significand rounds up at the element's precision",
    "M04: vLLM #43557",
    choices={"mx_scale_rule": "even"},
    methods=("mxfp4",),
)
def even_threshold_of_one_and_a_half():
    def wrapper(original, amax, element, name):
        exponent, finite = original(amax, element, "floor")
        return exponent + (torch.frexp(amax)[0] >= 0.75).int(), finite

    return around(mx, "scale_exponent", wrapper)


def by_log2(rounding, dtype):
    def change(exponent, amax, element):
        e = rounding(torch.log2(amax.to(dtype))).float() - element.max_exponent
        return torch.where(amax > 0, torch.nan_to_num(e, -127, 127, -127), -127).clamp(-127, 127).int()

    return exponents(change)


@mutant("mxfp4", "forward", None, "the exponent is read from the bits", "M05: torchao #1908 (b1ea75c68)", **ENCODE)
def exponent_by_log2_in_float32():
    return by_log2(torch.floor, torch.float32)


@mutant("mxfp4", "forward", None, "the exponent is read from the bits", "M05: torchao #1908", **ENCODE)
def exponent_by_log2_in_bfloat16():
    return by_log2(torch.floor, torch.bfloat16)


@mutant("expert_hidden", "forward", 1, "the exponent is read from the bits", "M05: torchao e92c7216d")
def exponent_by_log2_in_float16():
    return by_log2(torch.floor, torch.float16)


@mutant(
    "mxfp4",
    "forward",
    None,
    "ceil reads the exponent from the bits",
    "M05: torchao #1908",
    choices={"mx_scale_rule": "ceil"},
    **ENCODE,
)
def ceil_of_log2_in_float32():
    return by_log2(torch.ceil, torch.float32)


@mutant("mxfp4", "forward", None, "an all-zero block gets code 0", "mx.md", **ENCODE)
def zero_block_gets_scale_one():
    return exponents(lambda e, amax, element: torch.where(amax > 0, e, 0))


@mutant("mxfp4", "forward", None, "exponents are clamped to [-127, 127]", "M08: flashinfer #2440", **ENCODE)
def exponent_clamped_one_too_high():
    return exponents(lambda e, amax, element: torch.where(amax > 0, e.clamp(min=-126), e))


@mutant("mxfp4", "forward", None, "subnormal inputs count as they are", "M08: TensorLib #99", **ENCODE)
def subnormal_blocks_flushed():
    return around(
        mx, "split_blocks", lambda o, x: torch.where(o(x).abs() < torch.finfo(torch.float32).tiny, 0 * o(x), o(x))
    )


@mutant(
    "mxfp4",
    "forward",
    None,
    "NaN or infinity anywhere: scale code 255",
    "M10: TE #3550, #2407; torchao #4201",
    **ENCODE,
)
def nan_lost_in_the_maximum():
    return around(mx, "split_blocks", lambda o, x: torch.nan_to_num(o(x), nan=0.0, posinf=torch.inf, neginf=-torch.inf))


@mutant("mxfp4", "forward", None, "NaN or infinity anywhere: scale code 255", "M10: torchao #4725", **ENCODE)
def infinity_gets_scale_254():
    return around(mx, "split_blocks", lambda o, x: torch.nan_to_num(o(x), nan=torch.nan, posinf=3.4e38, neginf=-3.4e38))


@mutant("mx_input", "forward", 1, "a block is 32 values", "M01; NVFP4 uses 16")
def blocks_of_sixteen():
    def wrapper(original, x, form, name, *args):
        with patch(mx, "BLOCK", 16):
            return original(x, form, name, *args)

    return around(moe, "fake_quantize", wrapper)


@mutant("mx_input", "forward", 1, "a block has its own scale", "own; per-row scales")
def scale_of_the_whole_row():
    return exponents(lambda e, amax, element: e.amax(-1, keepdim=True).expand_as(e))


@mutant("mx_input", "forward", 1, "a block has its own scale", "scale layouts: flashinfer #4574")
def scales_of_neighbouring_blocks_swapped():
    return exponents(lambda e, amax, element: e.roll(1, -1) if e.shape[-1] > 1 else e)


@mutant("expert_hidden", "forward", 1, "blocks lie along the contraction axis", "M20: torchao #1501; TE #1490")
def weight_blocks_along_the_output():
    def wrapper(original, x, form, *args):
        return (
            original(x.mT.contiguous(), form, *args).mT
            if form == "mxfp4" and x.shape[-2] % 32 == 0
            else original(x, form, *args)
        )

    return around(moe, "fake_quantize", wrapper)


@mutant("mx_input", "forward", 1, "a block has its own scale", "M31; per-tensor FP8")
def scale_of_the_whole_tensor():
    return exponents(lambda e, amax, element: e.max().expand_as(e))


@mutant("mx_input", "forward", 1, "divide by the rounded scale", "M31: transformers #46763")
def divided_by_the_unrounded_scale():
    def wrapper(original, scaled, element):
        top = (2 - 2.0**-element.mantissa_bits) if element.bits == 8 else 1.5
        largest = scaled.abs().amax(-1, keepdim=True)
        exact = largest / ((1.75 if element.bits == 8 else top) * 2.0**element.max_exponent)
        return original(torch.where(largest > 0, scaled / torch.where(exact > 0, exact, 1), scaled), element)

    return around(mx, "encode", wrapper)


# -- elements ----------------------------------------------------------------------------------------------------------


def rounding(change):
    """``change`` in place of rounding half to even."""

    def wrapper(original, scaled, element):
        with patch(mx.torch, "round", change):
            return original(scaled, element)

    return around(mx, "encode", wrapper)


@mutant("mxfp4", "forward", None, EVEN, "M17", **ENCODE)
def ties_away_from_zero():
    return rounding(lambda x: torch.floor(x + 0.5))


@mutant("mxfp4", "forward", None, EVEN, "M13: tilelang #2704", **ENCODE)
def ties_toward_zero():
    return rounding(lambda x: torch.ceil(x - 0.5))


@mutant("mx_input", "forward", 1, EVEN, "M17: bitstring #342; cutile #250; onnx #5456")
def elements_truncated():
    return rounding(torch.floor)


@mutant(
    "mx_input", "forward", 1, "forward rounding is deterministic, to nearest", "M19: oneDNN #2903; Primus-Turbo #365"
)
def stochastic_rounding_forward():
    generator = torch.Generator().manual_seed(0)
    return rounding(lambda x: torch.floor(x + torch.rand(x.shape, generator=generator, dtype=x.dtype)))


@mutant("mxfp4", "forward", None, "a carry moves to the next binade", "M14: rocm-systems #6870", **ENCODE)
def carry_dropped():
    def wrapper(original, scaled, element):
        codes = original(scaled, element)
        magnitude = scaled.abs()
        binade = torch.frexp(magnitude).exponent - 1
        down = torch.ldexp(torch.tensor(2 - 2.0**-element.mantissa_bits), binade)
        carried = (magnitude > down) & (binade >= element.min_exponent) & (binade < element.max_exponent)
        return torch.where(carried, original(torch.where(carried, torch.sign(scaled) * down, scaled), element), codes)

    return around(mx, "encode", wrapper)


@mutant("mx_input", "forward", 1, "finite values saturate at the largest", "M01; gauge: saturates at 4")
def saturates_one_binade_early():
    def wrapper(original, scaled, element):
        return original(scaled.clamp(-(2.0**element.max_exponent), 2.0**element.max_exponent), element)

    return around(mx, "encode", wrapper)


@mutant(
    "mxfp8",
    "forward",
    None,
    "finite values saturate at 448",
    "M02: torchao #1911, #4359; pytorch #178817",
    methods=("mxfp8",),
)
def overflow_becomes_nan():
    def wrapper(original, scaled, element):
        codes = original(scaled, element)
        return torch.where(scaled.abs() > 464, codes | 0x7F, codes)

    return around(mx, "encode", wrapper)


@mutant("mxfp4", "forward", None, "E2M1 has the subnormal 0.5", "M13: aiter #974; tt-metal #51975", methods=("mxfp4",))
def half_flushed_to_zero():
    return around(
        mx, "encode", lambda o, s, e: o(torch.where(s.abs() < 0.5, torch.copysign(torch.zeros_like(s), s), s), e)
    )


@mutant(
    "mxfp4",
    "forward",
    None,
    "0.25 is a tie, to even: 0; just above it is 0.5",
    "M13: tt-metal #51975",
    methods=("mxfp4",),
)
def boundary_of_the_subnormals_too_high():
    return around(
        mx,
        "encode",
        lambda o, s, e: o(torch.where(s.abs() <= 0.25 * (1 + 2.0**-6), torch.copysign(torch.zeros_like(s), s), s), e),
    )


@mutant(
    "mxfp8",
    "forward",
    None,
    "E4M3 subnormals reach 2^-9",
    "M13: neural-compressor #1891; mase #321",
    methods=("mxfp8",),
)
def subnormal_elements_flushed():
    return around(
        mx,
        "encode",
        lambda o, s, e: o(torch.where(s.abs() < 2.0**e.min_exponent, torch.copysign(torch.zeros_like(s), s), s), e),
    )


@mutant(
    "mxfp4",
    "forward",
    None,
    "-0 stays -0, tiny negatives keep their sign",
    "M28: bitstring #333; tt-metal #47219",
    **ENCODE,
)
def negative_zero_lost():
    def wrapper(original, scaled, element):
        codes = original(scaled, element)
        return torch.where(codes == 1 << (element.bits - 1), torch.zeros_like(codes), codes)

    return around(mx, "encode", wrapper)


@mutant("mxfp4", "forward", None, "far smaller elements become zero", "M29: rocm-systems #10591", **ENCODE)
def shift_count_wraps():
    def wrapper(original, scaled, element):
        distance = -torch.frexp(scaled).exponent
        wrapped = torch.where(
            (distance >= 64) & (scaled != 0), torch.copysign(torch.full_like(scaled, 2.0), scaled), scaled
        )
        return original(wrapped, element)

    return around(mx, "encode", wrapper)


@mutant(
    "mxfp4",
    "forward",
    None,
    "no reciprocal: its overflow is no element",
    "M07: torchao #4117; M08: flashinfer #2440",
    **ENCODE,
)
def multiplied_by_a_float32_reciprocal():
    def wrapper(original, exponent, dtype):
        value = original(exponent, torch.float64)
        value = torch.where(value > torch.finfo(torch.float32).max / 2, torch.inf, value)
        return torch.nan_to_num(value, posinf=float(torch.finfo(torch.float32).max)).to(dtype)

    return during(mx, "quantize", lambda: around(mx, "power_of_two", wrapper))


@mutant("mx_input", "forward", 1, "every element counts", "own: passes an SQNR test")
def fifth_element_of_a_block_zeroed():
    def wrapper(original, scaled, element):
        keep = torch.arange(scaled.shape[-1]) % 32 != 5
        return original(scaled * keep, element)

    return around(mx, "encode", wrapper)


@mutant("mx_input", "forward", 1, "mxfp8_element: e4m3", "kernels: e4m3")
def e5m2_in_place_of_e4m3():
    return around(moe, "fake_quantize", lambda o, x, form, *args: o(x, form.replace("e4m3", "e5m2"), *args))


@mutant("mx_input", "forward", 1, "quantize_source: the stored value", "M; mx.md: double rounding")
def rounded_to_bfloat16_first():
    return around(moe, "fake_quantize", lambda o, x, form, name, source, ste: o(x, form, name, "bfloat16", ste))


@mutant(
    "mx_input",
    "forward",
    1,
    "quantize_source: bfloat16",
    "mx.md: double rounding",
    choices={"quantize_source": "bfloat16"},
)
def not_rounded_first_though_declared():
    return around(moe, "fake_quantize", lambda o, x, form, name, source, ste: o(x, form, name, "stored", ste))


@mutant(
    "fake_mxfp4",
    "forward",
    None,
    "quantize_source holds for the fake quantiser",
    "mx.md",
    choices={"quantize_source": "bfloat16"},
    methods=("fake_mxfp4", "fake_mxfp8"),
)
def double_rounding_forgotten():
    return around(mx, "fake_quantize", lambda o, x, form, name, source, ste: o(x, form, name, "stored", ste))


# -- decoding ----------------------------------------------------------------------------------------------------------

DECODE = ("mxfp4_decode", "mxfp8_decode")


@mutant(
    "mxfp4_decode",
    "forward",
    None,
    "even index in the low nibble",
    "M11: torchao #3123; triton #5197; imp #567",
    methods=("mxfp4_decode",),
)
def nibbles_swapped():
    return patch(mx, "unpack", lambda packed: torch.stack([packed >> 4, packed & 0xF], -1).flatten(-2))


@mutant("mxfp4_decode", "forward", None, "two neighbours share a byte", "M11: triton #5197", methods=("mxfp4_decode",))
def halves_packed_instead_of_pairs():
    return patch(mx, "unpack", lambda packed: torch.cat([packed & 0xF, packed >> 4], -1))


@mutant(
    "mxfp8_decode",
    "forward",
    None,
    "an E4M3 subnormal is m 2^-9",
    "M16: 1bit-MONSTER #300; b12x #388",
    methods=("mxfp8_decode",),
)
def subnormals_decoded_one_binade_off():
    def wrapper(original, element, device=None):
        values = original(element, device)
        small = values.abs() < 2.0**element.min_exponent
        return torch.where(small, values / 2, values)

    return around(mx, "grid", wrapper)


@mutant("mxfp4_decode", "forward", None, "the scale is 2^(byte-127)", "M34: omlx #2159", methods=DECODE)
def scale_byte_read_as_a_number():
    return during(mx, "dequantize", lambda: around(mx, "power_of_two", lambda o, e, dtype: o(e * 0, dtype) * (e + 127)))


@mutant(
    "mxfp4_decode", "forward", None, "byte 254 and byte 0 are scales", "M07: torchao #4117; TE #2408", methods=DECODE
)
def extreme_scales_flushed():
    def wrapper(original, e, dtype):
        return torch.where((e <= -127), 0.0, original(e, dtype))

    return during(mx, "dequantize", lambda: around(mx, "power_of_two", wrapper))


@mutant("mxfp4_decode", "forward", None, "scale code 255 is NaN", "M10: torchao #4654", methods=DECODE)
def nan_scale_decoded_as_a_number():
    return patch(mx, "NAN_SCALE", 256)


@mutant("mxfp4_decode", "forward", None, "-0 is a code", "M28: llm-scaler #569", methods=DECODE)
def negative_zero_decoded_as_zero():
    return around(mx, "grid", lambda o, *args: torch.where(o(*args) == 0, 0.0, o(*args)))


# -- straight-through gradients and products ---------------------------------------------------------------------------


def fake(change):
    """``change(original, x, format, rule, source, ste)`` of the fake quantiser in the experts."""
    return around(moe, "fake_quantize", change)


@mutant("mx_hidden", "backward", STEPS, STE, "M25: torchao #4806")
def no_gradient_through_the_hidden_quantiser():
    return around(moe, "mx_hidden", lambda o, h, *args: o(h.detach() + 0 * h, *args))


@mutant("mx_input", "backward", STEPS, STE)
def no_gradient_through_the_input_quantiser():
    return around(moe, "mx_input", lambda o, z, *args: o(z.detach() + 0 * z, *args))


@mutant("mx_hidden", "backward", STEPS, STE, "M25: torchao #4806; pytorch #191142")
def gradient_clipped_though_declared_identity():
    return fake(lambda o, x, form, name, source, ste: o(x, form, name, source, "clipped"))


@mutant("mx_hidden", "backward", STEPS, "ste: clipped", "M25", choices={"ste": "clipped"})
def gradient_passed_though_declared_clipped():
    return fake(lambda o, x, form, name, source, ste: o(x, form, name, source, "identity"))


@mutant(
    "fake_mxfp4",
    "backward",
    None,
    "ste clipped: zero strictly beyond the largest",
    "M25: torchao #4806; pytorch #184574",
    choices={"ste": "clipped"},
    methods=("fake_mxfp4", "fake_mxfp8"),
)
def clipped_at_the_bound_itself():
    return _clip(lambda value, limit: value < limit)


@mutant(
    "fake_mxfp4",
    "backward",
    None,
    "ste clipped: beyond the largest, not beyond amax",
    "M25",
    choices={"ste": "clipped"},
    methods=("fake_mxfp4", "fake_mxfp8"),
)
def clipped_one_binade_late():
    return _clip(lambda value, limit: value <= 2 * limit)


def _clip(inside):
    def wrapper(original, x, form, name, source, ste):
        y = original(x, form, name, source, "identity")
        scales, _ = mx.quantize(x.detach(), form, name)
        element = mx.element_format(form)
        limit = mx.grid(element)[element.largest] * mx.power_of_two(scales.int() - 127, torch.float64)
        keep = inside(x.detach().unflatten(-1, (-1, 32)).abs(), limit.unsqueeze(-1)).flatten(-2)
        return backward(y, lambda d: torch.where(keep, d, 0))

    return around(mx, "fake_quantize", wrapper)


@mutant("mx_hidden", "backward", STEPS, "the gradient is not quantised", "M20: Model-Optimizer #1678")
def gradient_quantised_too():
    def wrapper(original, x, form, *args):
        return (
            backward(original(x, form, *args), lambda d: mx.fake_quantize(d, form))
            if form != "mxfp4"
            else original(x, form, *args)
        )

    return fake(wrapper)


@mutant("mx_input", "backward", STEPS, STE, "own: gradient multiplied by the scale")
def gradient_multiplied_by_the_scale():
    def wrapper(original, x, form, name, *args):
        y = original(x, form, name, *args)
        if form == "mxfp4":
            return y
        scale = mx.power_of_two(mx.quantize(x.detach(), form, name)[0].int() - 127, x.dtype)
        return backward(y, lambda d: (d.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2))

    return during(moe, "mx_input", lambda: fake(wrapper))


def product(change):
    """``change(original, rows, weight, dtype, master)`` of one expert product, ``master`` its unquantised weight."""

    def quantised(original, params, config, choices):
        out = original(params, config, choices)
        for which in out:
            for e, w in enumerate(out[which]):
                w.master = params[expert_name(e, which)]
        return out

    def linear(original, x, w, dtype=None):
        return change(original, x, w, dtype, w.master) if hasattr(w, "master") else original(x, w, dtype)

    return both(around(unroll, "quantize_experts", quantised), around(moe, "linear", linear))


@mutant("expert_output", "backward", STEPS, OPERANDS, "M20: torchao #1501; TE #1490; Primus-Turbo #503")
def input_gradient_from_unquantised_weights():
    def change(original, x, w, dtype, master):
        y = original(x.detach(), w, dtype)
        dx = original(x, master.detach().to(x.dtype), dtype)
        return y + (dx - dx.detach())

    return product(change)


@mutant("expert_output", "backward", STEPS, "dX = dY Wq", "M20: TE #1490")
def input_gradient_from_transposed_blocks():
    def change(original, x, w, dtype, master):
        if master.shape[0] % 32:
            return original(x, w, dtype)
        other = mx.fake_quantize(master.detach().mT.contiguous(), "mxfp4").mT
        y, dx = original(x.detach(), w, dtype), original(x, other.to(x.dtype), dtype)
        return y + (dx - dx.detach())

    return product(change)


@mutant("expert_output", "backward", None, "dWq = dY^T Xq", "M20: Primus-Turbo #503; Model-Optimizer #1678")
def weight_gradient_from_unquantised_inputs():
    raw = {}

    def mx_hidden(original, hidden, *args):
        y = original(hidden, *args)
        raw["hidden"] = hidden.detach()
        return y

    def expert_output(original, hidden, quantized, groups, record):
        seen = quantized | {"w2": tuple(w.detach() for w in quantized["w2"])}
        y = original(hidden, seen, groups, lambda name, x: x)
        dw = original(raw["hidden"], quantized, groups, lambda name, x: x)
        return record("expert_output", y + (dw - dw.detach()))

    return both(around(moe, "mx_hidden", mx_hidden), around(moe, "expert_output", expert_output))


@mutant("expert_hidden", "backward", STEPS, "every use of the latent counts: n experts, gate and up")
def gradient_of_one_use_of_the_latent():
    return during(
        moe,
        "expert_hidden",
        lambda: around(moe, "expert_linear", lambda o, x, w, g, dtype: o(backward(x, lambda d: d / 2), w, g, dtype)),
    )


# -- what is quantised -------------------------------------------------------------------------------------------------


@mutant("expert_hidden", "forward", 1, ONLY, "M35: tokenspeed #527")
def expert_weights_not_quantised():
    return fake(lambda o, x, form, *args: x + 0 if form == "mxfp4" else o(x, form, *args))


@mutant("expert_output", "forward", 1, ONLY, "M35: tokenspeed #527")
def w2_not_quantised():
    def wrapper(original, params, config, choices):
        names = [expert_name(e, "w2") for e in range(config.num_experts)]
        return original(params, config, choices) | {"w2": tuple(params[n] for n in names)}

    return around(unroll, "quantize_experts", wrapper)


@mutant("mx_input", "forward", 1, ONLY, "M35: tokenspeed #527")
def inputs_not_quantised():
    return fake(lambda o, x, form, *args: o(x, form, *args) if form == "mxfp4" else x + 0)


@mutant("mx_hidden", "forward", 1, "quantize_hidden: true", "readings of report 4.1.4 differ")
def hidden_not_quantised():
    return around(
        moe, "mx_hidden", lambda o, h, w, choices, record: o(h, w, choices.replace(quantize_hidden=False), record)
    )


@mutant("expert_output", "forward", 1, "quantize_hidden: false", choices={"quantize_hidden": False})
def hidden_quantised_though_declared_not():
    return around(
        moe, "mx_hidden", lambda o, h, w, choices, record: o(h, w, choices.replace(quantize_hidden=True), record)
    )


def quantised_parameter(name, form="mxfp4"):
    def widen(original, params):
        w = params[name]
        padded = torch.nn.functional.pad(w, (0, -w.shape[-1] % 32))
        return original(params) | {name: mx.fake_quantize(padded, form)[..., : w.shape[-1]]}

    return around(unroll, "widen", widen)


@mutant("router_scores", "forward", 1, ONLY, "M35: tokenspeed #527")
def router_quantised():
    return quantised_parameter(MOE + "gate.weight")


@mutant("shared_experts", "forward", 1, ONLY, "M35: tokenspeed #527")
def shared_experts_quantised():
    return quantised_parameter(MOE + "shared_experts.down_proj.weight")


@mutant("latent_down", "forward", 1, ONLY, "M35: tokenspeed #527")
def latent_projection_quantised():
    return quantised_parameter(MOE + "routed_expert_down_proj.weight", "mxfp8_e4m3")


@mutant("mla_query", "forward", 1, ONLY, "M35: tokenspeed #527")
def attention_weights_quantised():
    return quantised_parameter("self_attn.q_b_proj.weight", "mxfp8_e4m3")


@mutant("dense_mlp", "forward", 1, "the MLP of eagle3 is unquantised", "M35: tokenspeed #527", layout="eagle3")
def dense_mlp_quantised():
    return quantised_parameter("mlp.gate_proj.weight")


@mutant("latent_down", "forward", 1, "the latent is rounded to storage only", "M35; nested quantisation")
def latent_projections_input_quantised():
    def wrapper(original, x, params, record):
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))
        return original(mx.fake_quantize(padded, "mxfp8_e4m3")[..., : x.shape[-1]], params, record)

    return around(moe, "latent_down", wrapper)
