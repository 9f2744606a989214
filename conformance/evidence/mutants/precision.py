"""Small coherent faults: undeclared formats, truncation, accumulators, approximations, lost terms."""

import torch

from draftconf.fast import attention, layer, moe, ops, unroll

from .attention import attention_with
from .core import STEPS, area, around, everywhere, patch, with_gradient_of

MUTANTS: list = []
mutant = area("precision", MUTANTS)
DECLARED = "sums are accumulated in the declared format (docs/bounds.md, *reduce*)"


def product(change):
    """``change(x, weight)`` in float32 in place of every matrix product; rounded afterwards as usual."""

    def wrapper(original, x, weight, dtype=None):
        compute = ops.wide(x.dtype)
        return change(x.to(compute), weight.to(compute)).to(dtype or x.dtype)

    return everywhere("linear", wrapper)


def truncated(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 with its last ``bits`` cut off."""
    return (x.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    half = 1 << (bits - 1)
    i = x.contiguous().view(torch.int32)
    return ((i + half - 1 + ((i >> bits) & 1)) & -(1 << bits)).view(torch.float32)


@mutant("fusion", "forward", 1, "stores round to nearest", "own", policy="bfloat16")
def stores_truncate():
    def wrapper(original, x, weight, dtype=None):
        y = original(x, weight, ops.wide(x.dtype))
        return y if dtype == torch.float32 else with_gradient_of(truncated(y, 16), y).bfloat16()

    return everywhere("linear", wrapper)


@mutant("fusion", "forward", 1, DECLARED, "own", policy="bfloat16")
def accumulates_in_bfloat16():
    def change(x, w):
        total = 0
        for a, b in zip(x.split(16, -1), w.split(16, -1), strict=True):
            total = (total + torch.nn.functional.linear(a, b)).bfloat16().float()
        return total

    return product(change)


@mutant("fusion", "forward", 1, DECLARED, "own")
def accumulates_in_bfloat16_declared_float32():
    def change(x, w):
        total = 0
        for a, b in zip(x.split(32, -1), w.split(32, -1), strict=True):
            total = (total + torch.nn.functional.linear(a, b)).bfloat16().float()
        return total

    return product(change)


@mutant("fusion", "forward", 1, "products in float32, not TF32, where declared", "own")
def tf32_products():
    cut = lambda x: with_gradient_of(rounded(x, 13), x)  # noqa: E731
    return product(lambda x, w: torch.nn.functional.linear(cut(x), cut(w)))


@mutant("fusion", "forward", 1, "products in float32 where declared")
def bfloat16_products():
    cut = lambda x: with_gradient_of(rounded(x, 16), x)  # noqa: E731
    return product(lambda x, w: torch.nn.functional.linear(cut(x), cut(w)))


@mutant("fusion", "forward", 1, "every term of a product counts", "own")
def last_term_dropped():
    return product(lambda x, w: torch.nn.functional.linear(x[..., :-1], w[..., :-1]))


@mutant("fusion", "forward", 1, "every term of a product counts", "own: K not a multiple of 64")
def terms_beyond_the_last_whole_tile_dropped():
    return product(
        lambda x, w: torch.nn.functional.linear(
            x[..., : x.shape[-1] // 64 * 64 or None], w[..., : x.shape[-1] // 64 * 64 or None]
        )
    )


@mutant("logits", "backward", STEPS, "cotangents are accumulated in the declared format", policy="bfloat16")
def gradient_products_in_bfloat16():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return torch.nn.functional.linear(x, w)

        @staticmethod
        def backward(ctx, d):
            x, w = ctx.saved_tensors
            d_w = (d.bfloat16().float().flatten(0, -2).mT @ x.flatten(0, -2)).bfloat16().float()
            return d.bfloat16().float() @ w, d_w

    return product(Product.apply)


@mutant("mla_query", "forward", 1, "every sum is accumulated in float32", "own: float16 in one kernel")
def one_projection_in_float16():
    def wrapper(original, x, params, *args):
        w = params["self_attn.q_b_proj.weight"]
        return original(x, params | {"self_attn.q_b_proj.weight": with_gradient_of(w.half().float(), w)}, *args)

    return around(attention, "mla_query", wrapper)


@mutant("draft_input", "forward", 1, "statistics in the accumulation format", "own", policy="bfloat16")
def norm_statistics_in_bfloat16():
    def wrapper(original, x, weight, eps):
        wide = x.float()
        root = torch.sqrt(wide.square().mean(-1, keepdim=True) + eps).bfloat16().float()
        return (weight.float() * (wide / root)).to(x.dtype)

    return everywhere("rms_norm", wrapper)


@mutant("draft_input", "forward", 1, "the normalised value is not rounded unless declared", "own", policy="bfloat16")
def normalised_value_rounded_before_the_gain():
    def wrapper(original, x, weight, eps):
        wide = x.float()
        root = torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight.float() * (wide / root).to(x.dtype)).to(x.dtype)

    return everywhere("rms_norm", wrapper)


@mutant("draft_input", "forward", 1, "reciprocal roots to float32 accuracy", "own: an unrefined hardware rsqrt")
def rsqrt_of_twelve_bits():
    def wrapper(original, x, weight, eps):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return weight * (x * with_gradient_of(rounded(scale, 12), scale))

    return everywhere("rms_norm", wrapper)


@mutant("attn_gate", "forward", 1, "elementary functions to a few ulp", "own")
def hard_sigmoid_gate():
    return _sigmoid(attention, lambda x: (x / 6 + 0.5).clamp(0, 1))


@mutant("attn_gate", "forward", 1, "elementary functions to a few ulp", "own: fast-math exponentials")
def sigmoid_to_four_digits():
    return _sigmoid(attention, lambda x: with_gradient_of(rounded(torch.sigmoid(x), 10), torch.sigmoid(x)))


def _sigmoid(module, change):
    class Torch:
        def __getattr__(self, name):
            return change if name == "sigmoid" else getattr(torch, name)

    return patch(module, "torch", Torch())


@mutant("attention", "forward", 1, "elementary functions to a few ulp", "own: exp2 by a short polynomial")
def exponentials_to_four_digits():
    def softmax(scores):
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        e = with_gradient_of(rounded(e, 10), e)
        return e / e.sum(-1, keepdim=True)

    return patch(attention, "attention", lambda *args: attention_with(*args, softmax=softmax))


@mutant(
    "attn_output", "forward", 1, "added once, rounded once", "own: double rounding of the projection", policy="bfloat16"
)
def projection_rounded_twice():
    def wrapper(original, gated, params, residual, record):
        projected = ops.linear(gated, params["self_attn.o_proj.weight"]).float()
        half = (residual.float() + projected / 2).bfloat16().float()
        return record("attn_output", (half + projected / 2).to(residual.dtype))

    return around(layer, "attn_output", wrapper)


@mutant("moe_combine", "forward", 1, "the expert sum is accumulated in float32", policy="bfloat16")
def experts_summed_in_bfloat16():
    def wrapper(original, output, weights, choices, record):
        total = torch.zeros_like(output[..., 0, :])
        for i in range(output.shape[-2]):
            total = total + (weights[..., i, None].to(output.dtype) * output[..., i, :])
        return record("moe_combine", total)

    return around(moe, "moe_combine", wrapper)


@mutant("lk_loss", "forward", None, "losses are accumulated in float32", "L05", policy="bfloat16")
def losses_in_bfloat16():
    return around(unroll, "lk_loss", lambda o, *args, **kwargs: o(*args, **kwargs).bfloat16().float())


@mutant("total_loss", "forward", None, "losses are accumulated in float32", "L05")
def total_rounded_to_bfloat16():
    return around(unroll, "total_loss", lambda o, *args: (o(*args)[0].bfloat16().float(), o(*args)[1]))


@mutant("layer_output", "forward", 1, "a relative error of 1e-5", "own")
def output_scaled_by_1_plus_1e_5():
    def wrapper(original, x, *args):
        record = args[-1]
        scaled = lambda name, y: record(name, y * (1 + 1e-5) if name == "layer_output" else y)  # noqa: E731
        return original(x, *args[:-1], scaled)

    return around(layer, "feed_forward", wrapper)


@mutant("mla_latent", "forward", 1, "one element off by 1e-4 of itself", "own")
def one_element_off():
    def wrapper(original, x, params, record):
        def spoiled(name, y):
            change = torch.ones_like(y)
            change[0, 2, 3] += 1e-4
            return record(name, y * change)

        return original(x, params, spoiled)

    return around(attention, "mla_latent", wrapper)


def stochastic_stores(original, x, weight, dtype=None):
    """Products stored in bfloat16 by stochastic rounding: a fault unless it is declared."""
    y = original(x, weight, ops.wide(x.dtype))
    if (dtype or x.dtype) != torch.bfloat16:
        return y.to(dtype or x.dtype)
    dither = torch.randint(0, 1 << 16, y.shape, dtype=torch.int32)
    up = ((y.detach().contiguous().view(torch.int32) + dither) & -(1 << 16)).view(torch.float32)
    return with_gradient_of(up, y).bfloat16()


@mutant(
    "fusion", "forward", 1, "stores round to nearest unless declared otherwise", "M19: oneDNN #2903", policy="bfloat16"
)
def stochastic_rounding_undeclared():
    torch.manual_seed(0)
    return everywhere("linear", stochastic_stores)
