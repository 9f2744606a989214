"""Random parameters and inputs for a config, the configs and choices that the tests run over, and a naive quantiser."""

import itertools
from fractions import Fraction

import numpy as np

from draftconf.reference.config import ALTERNATIVES, Choices, DraftConfig, parameter_shapes

LAYOUTS = ALTERNATIVES["draft_input"]

#: Small enough to perturb every coordinate; the MX widths cannot go below one block.
MICRO = DraftConfig(
    hidden_size=6, vocab_size=11, num_steps=3, num_attention_heads=2, q_lora_rank=5, kv_lora_rank=4,
    qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4, num_experts=3, num_experts_per_token=2,
    routed_expert_hidden_size=32, moe_intermediate_size=64, num_shared_experts=1, intermediate_size=7,
    routed_scaling_factor=1.5,
)  # fmt: skip

#: Fields that mean nothing unless another one is set.
NEEDED = {"reduced_target": {"head": "reduced"}, "reduced_supervision": {"head": "reduced"}}


def alternatives() -> list[dict]:
    """Every non-default value of every choice, in both layouts, together with what it needs."""
    changes = [{}, {"step_weights": (0.5, 0.0, 2.0)}, {"feature_tap": "mixture,mixture,block_sum"}]
    for field, (_, *others) in ALTERNATIVES.items():
        changes += [{field: value, **NEEDED.get(field, {})} for value in others if field != "draft_input"]
    changes.append({"reduced_target": "renormalized", "reduced_supervision": "argmax_inside", "head": "reduced"})
    changes.append({"token_source": "own", "head": "reduced"})
    changes.append({"recycled_feature": "post_norm", "detach_between_steps": True})
    return [{"draft_input": layout, **change} for layout, change in itertools.product(LAYOUTS, changes)]


def label(change: dict) -> str:
    return "-".join(f"{field}={value}" for field, value in change.items()) or "default"


def sized_for(choices: Choices, config: DraftConfig) -> DraftConfig:
    """The config with a smaller draft vocabulary where the head is reduced, and as many steps as the weights given."""
    changes = {"draft_vocab_size": config.vocab_size * 2 // 3} if choices.head == "reduced" else {}
    if not isinstance(choices.step_weights, str):
        changes["num_steps"] = len(choices.step_weights)
    return DraftConfig(**{**config.to_dict(), **changes})


def random_parameters(config: DraftConfig, choices: Choices, seed: int = 0) -> dict:
    """No parameter at a neutral value: norm weights and the router bias differ from 1 and 0."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config, choices).items():
        if name.endswith("bias"):
            params[name] = rng.normal(0, 0.3, shape)
        elif len(shape) == 1:
            params[name] = np.exp(rng.normal(0, 0.3, shape))
        else:
            params[name] = rng.normal(0, 1.0 if name.startswith("embed") else shape[-1] ** -0.5, shape)
    return params


def random_inputs(config: DraftConfig, choices: Choices, seed: int = 0, documents=None, rows=2, slots=8) -> dict:
    """Slot-aligned inputs with a ragged mask; what only some choices read is there when they do."""
    rng = np.random.default_rng(seed + 1)
    if documents is not None:
        documents = np.array(documents, np.int32)
        rows, slots = documents.shape
    inputs = {
        "tokens": rng.integers(0, config.vocab_size, (rows, slots)),
        **{name: rng.normal(0, 1, (rows, slots, config.hidden_size)) for name in ("low", "mid", "high")},
        "target_logits": rng.normal(0, 2, (rows, slots, config.vocab_size)),
        "mask": rng.random((rows, slots)) < 0.8,
    }
    inputs["mask"][:, 1] = True
    if documents is not None:
        inputs["documents"] = documents
    if choices.head == "reduced":
        inputs["draft_to_target"] = rng.permutation(config.vocab_size)[: config.draft_vocab_size]
    if choices.token_source == "given":
        inputs["tokens_by_step"] = rng.integers(0, config.vocab_size, (config.num_steps, rows, slots))
    return inputs


def case(change: dict, config: DraftConfig, seed: int = 0, **kwargs):
    """(params, inputs, config, choices) for a change to the default choices: the arguments of ``unroll``."""
    choices = Choices(**change)
    config = sized_for(choices, config)
    return random_parameters(config, choices, seed), random_inputs(config, choices, seed, **kwargs), config, choices


def assert_same_bits(actual, expected, name="") -> None:
    """Equal shape, dtype and bytes: NaN equals NaN, and 0 differs from -0."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, name
    assert actual.shape == expected.shape, name
    assert actual.tobytes() == expected.tobytes(), name


def assert_near(actual, expected, relative=1e-12, name="") -> None:
    """Within ``relative`` of the largest expected magnitude; never true of a NaN."""
    assert np.shape(actual) == np.shape(expected), name
    scale = np.max(np.abs(expected), initial=0.0)
    error = np.max(np.abs(actual - expected), initial=0.0)
    assert error <= relative * scale, f"{name}: error {error}, largest value {scale}"


# An MX quantiser in exact rationals, from the definitions of OCP MX v1.0 and of the four rules, one value at a time.


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> list[Fraction]:
    """The first ``count`` non-negative values of a format, in the order of their codes."""
    values = []
    for code in range(count):
        field, mantissa = divmod(code, 2**mantissa_bits)
        significand = Fraction(mantissa, 2**mantissa_bits) + (1 if field else 0)
        values.append(significand * Fraction(2) ** (max(field, 1) - bias))
    return values


#: Non-negative finite values by code; the codes after them are NaN or infinity.
GRIDS = {
    "mxfp4": _magnitudes(2, 1, 1, 8),
    "mxfp8_e4m3": _magnitudes(4, 3, 7, 127),
    "mxfp8_e5m2": _magnitudes(5, 2, 15, 124),
}
_MIDDLES = {form: [(a + b) / 2 for a, b in itertools.pairwise(grid)] for form, grid in GRIDS.items()}
SIGN_BIT = {"mxfp4": 8, "mxfp8_e4m3": 128, "mxfp8_e5m2": 128}
EMAX = {"mxfp4": 2, "mxfp8_e4m3": 8, "mxfp8_e5m2": 15}
SIGNIFICANT_BITS = {"mxfp4": 2, "mxfp8_e4m3": 4, "mxfp8_e5m2": 3}
RULES = ALTERNATIVES["mx_scale_rule"]


def floor_log2(x: Fraction) -> int:
    """The largest e with 2^e <= x."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def ceil_log2(x: Fraction) -> int:
    return -floor_log2(1 / x)


def to_significant_bits(x: Fraction, bits: int) -> Fraction:
    """x rounded to so many significant bits, half to even (``round`` of a Fraction is)."""
    unit = Fraction(2) ** (floor_log2(x) - bits + 1)
    return round(x / unit) * unit


def exact_exponent(amax: Fraction, form: str, rule: str) -> int:
    """The scale exponent of a block whose largest magnitude is ``amax`` > 0."""
    exponent = {
        "floor": lambda: floor_log2(amax) - EMAX[form],
        "ceil": lambda: ceil_log2(amax) - EMAX[form],
        "rceil": lambda: ceil_log2(amax / GRIDS[form][-1]),
        "even": lambda: floor_log2(to_significant_bits(amax, SIGNIFICANT_BITS[form])) - EMAX[form],
    }[rule]()
    return min(max(exponent, -127), 127)


def exact_code(x: float, exponent: int, form: str) -> int:
    """The code of the nearest element of x / 2^exponent, ties to the even code, saturating."""
    magnitude = abs(Fraction(x)) / Fraction(2) ** exponent
    middles = _MIDDLES[form]
    low, high = 0, len(middles)
    while low < high:  # the number of middles below the magnitude
        at = (low + high) // 2
        low, high = (at + 1, high) if middles[at] < magnitude else (low, at)
    if low < len(middles) and middles[low] == magnitude and low % 2:
        low += 1
    return low + (SIGN_BIT[form] if np.signbit(x) else 0)


def exact_block(block, form: str, rule: str) -> tuple[int, list[int]]:
    """(scale, codes) of one block of finite floats."""
    amax = max(abs(Fraction(float(x))) for x in block)
    exponent = exact_exponent(amax, form, rule) if amax else -127
    return exponent + 127, [exact_code(float(x), exponent, form) for x in block]
