"""Sizes and choices of the draft step: everything that is a number or a name, nothing that computes.

``DraftConfig`` holds the sizes, under the field names of the released ``config.json`` (K3 report, table 1).
``Choices`` holds what the report leaves open: each field is one question, its default one reading, and every
listed alternative is implemented unless ``REFUSED`` names it.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

BLOCK = 32  # values that share one MX scale (OCP MX v1.0, section 5.2)


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of the draft layer. Raises ValueError, naming the field, for a config that cannot be."""

    hidden_size: int = 7168
    vocab_size: int = 163840
    draft_vocab_size: int | None = None  # the vocabulary itself unless head is "reduced"
    num_steps: int = 7
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    num_experts: int = 896
    num_experts_per_token: int = 16
    routed_expert_hidden_size: int = 3584
    moe_intermediate_size: int = 3072
    num_shared_experts: int = 2
    intermediate_size: int = 33792
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0

    def __post_init__(self):
        if self.draft_vocab_size is None:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, int | None) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} is {value!r}; wanted an integer of at least 1")
            if field.type is float and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise ValueError(f"{field.name} is {value!r}; wanted a positive finite number")
        for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % BLOCK:
                raise ValueError(f"{name} is {getattr(self, name)}; wanted a multiple of the MX block, {BLOCK}")
        for small, large in (("num_experts_per_token", "num_experts"), ("draft_vocab_size", "vocab_size")):
            if getattr(self, small) > getattr(self, large):
                raise ValueError(f"{small} is {getattr(self, small)}; wanted at most {large}, {getattr(self, large)}")

    @property
    def query_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @classmethod
    def k3(cls) -> "DraftConfig":
        """The released sizes (K3 report, table 1, and config.json)."""
        return cls()

    @classmethod
    def tiny(cls) -> "DraftConfig":
        """Sizes for the default run; no two of them could be mistaken for one another."""
        return cls(
            hidden_size=80, vocab_size=97, num_steps=7, num_attention_heads=4, q_lora_rank=28, kv_lora_rank=20,
            qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10, num_experts=8, num_experts_per_token=3,
            routed_expert_hidden_size=64, moe_intermediate_size=96, num_shared_experts=2, intermediate_size=72,
            routed_scaling_factor=1.5,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "DraftConfig":
        """Sizes for longer runs: several MX blocks a row, a thousand tokens of vocabulary."""
        return cls(
            hidden_size=256, vocab_size=1009, num_steps=7, num_attention_heads=8, q_lora_rank=96, kv_lora_rank=64,
            qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, num_experts=32, num_experts_per_token=4,
            routed_expert_hidden_size=128, moe_intermediate_size=192, num_shared_experts=2, intermediate_size=320,
            routed_scaling_factor=1.5,
        )  # fmt: skip

    @classmethod
    def from_json(cls, source, **overrides) -> "DraftConfig":
        """Read a ``config.json``: a path, a JSON string or the object itself, whole or its ``text_config``.

        Unknown fields are ignored. Raises ValueError, naming field and value, for a setting that would change the
        mathematics, and KeyError for a size that is missing.
        """
        data = _load_json(source)
        data = data.get("text_config", data)
        _refuse_other_mathematics(data)
        names = [field.name for field in fields(cls) if field.name not in ("num_steps", "draft_vocab_size")]
        missing = [name for name in names if name not in data and name not in overrides]
        if missing:
            raise KeyError(f"config has no {missing[0]}; wanted the fields of a Kimi K3 config.json")
        return cls(**{**{name: data[name] for name in names if name in data}, **overrides})

    def to_dict(self) -> dict:
        return asdict(self)


def _load_json(source) -> dict:
    if isinstance(source, dict):
        return source
    text = str(source)
    return json.loads(text if text.lstrip().startswith("{") else Path(source).read_text(encoding="utf-8"))


#: config.json fields that select other mathematics, with the values this oracle computes.
SUPPORTED_SETTINGS = {
    "hidden_act": ("situ",),
    "moe_renormalize": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "mla_use_nope": (True,),
    "mla_use_output_gate": (True,),
    "latent_moe_use_norm": (True,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "tie_word_embeddings": (False,),
}


def _refuse_other_mathematics(data: dict) -> None:
    for name, allowed in SUPPORTED_SETTINGS.items():
        if name in data and data[name] not in allowed:
            raise ValueError(f"{name} is {data[name]!r}; this step is defined for {allowed[0]!r} only")
    heads = data.get("num_attention_heads")
    if heads is not None and data.get("num_key_value_heads", heads) != heads:
        raise ValueError(f"num_key_value_heads is {data['num_key_value_heads']}; wanted num_attention_heads, {heads}")


#: For every named choice, its values, the default first. Fields that take numbers are checked in ``Choices``.
ALTERNATIVES = {
    "draft_input": ("mtp", "eagle3"),
    "draft_layer": ("mla_moe",),
    "draft_attn_res": ("none",),
    "head": ("frozen_target", "own", "reduced"),
    "reduced_target": ("restricted", "renormalized"),
    "reduced_supervision": ("all", "argmax_inside"),
    "trained": ("all", "freeze_head_norm"),
    "target_alignment": ("shifted", "fixed"),
    "mask_alignment": ("position", "token", "slot"),
    "token_source": ("teacher", "own", "given"),
    "step_weights": ("uniform", "decay", "decay_normalized"),
    "reduction": ("supervised", "all_slots"),
    "routing_weight": ("after_down", "before_down"),
    "renormalize_epsilon": (0.0, 1e-20),
    "router_bias": ("frozen",),
    "latent_norm_eps": (1e-5, 1e-6),
    "feature_norm": ("none", "per_chunk", "joint"),
    "recycled_feature": ("pre_norm", "post_norm"),
    "zero_first_embedding": (False, True),
    "detach_between_steps": (False, True),
    "mx_scale_rule": ("floor", "ceil", "rceil", "even"),
    "mxfp8_element": ("e4m3", "e5m2"),
    "quantize_hidden": (True, False),
    "quantize_source": ("stored", "bfloat16"),
    "ste": ("identity", "clipped"),
    "feature_tap": ("block_sum,block_sum,output_mixture",),
}

#: Readings that are known and not computed yet, refused by name.
REFUSED = {
    "draft_layer": {
        "kda": "a Kimi Delta Attention layer",
        "kda_block": "a backbone block of three KDA layers and one MLA layer",
    },
    "draft_attn_res": {"target_blocks": "attention residuals over the target's blocks inside the draft"},
    "router_bias": {"quantile_balancing": "updating the router bias between steps (report eq. 14)"},
}

_NUMBERS = ("renormalize_epsilon", "latent_norm_eps")


@dataclass(frozen=True)
class Choices:
    """What the report leaves open, one field a question. Raises ValueError with a sentence for any other value."""

    draft_input: str = "mtp"
    draft_layer: str = "mla_moe"
    draft_attn_res: str = "none"
    head: str = "frozen_target"
    reduced_target: str = "restricted"
    reduced_supervision: str = "all"
    trained: str = "all"
    target_alignment: str = "shifted"
    mask_alignment: str = "position"
    token_source: str = "teacher"
    step_weights: str | tuple = "uniform"
    reduction: str = "supervised"
    routing_weight: str = "after_down"
    renormalize_epsilon: float = 0.0
    router_bias: str = "frozen"
    latent_norm_eps: float = 1e-5
    feature_norm: str = "none"
    recycled_feature: str = "pre_norm"
    zero_first_embedding: bool = False
    detach_between_steps: bool = False
    mx_scale_rule: str = "floor"
    mxfp8_element: str = "e4m3"
    quantize_hidden: bool = True
    quantize_source: str = "stored"
    ste: str = "identity"
    feature_tap: str = "block_sum,block_sum,output_mixture"

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "step_weights" and not isinstance(value, str):
                object.__setattr__(self, "step_weights", _checked_weights(value))
            elif field.name == "feature_tap":
                _check_feature_tap(value)
            elif field.name in _NUMBERS:
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                    raise ValueError(f"{field.name} is {value!r}; wanted a number from 0 to below 1")
            else:
                _check_named(field.name, value)
        if self.reduced_target != "restricted" and self.head != "reduced":
            raise ValueError(
                f"reduced_target is {self.reduced_target!r}, which needs head 'reduced', not {self.head!r}"
            )
        if self.reduced_supervision != "all" and self.head != "reduced":
            raise ValueError(
                f"reduced_supervision is {self.reduced_supervision!r}, which needs head 'reduced', not {self.head!r}"
            )

    @classmethod
    def from_dict(cls, data: dict) -> "Choices":
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"choices has a field {unknown[0]!r}; wanted one of {', '.join(sorted(known))}")
        return cls(**data)

    def to_dict(self) -> dict:
        values = asdict(self)
        if not isinstance(self.step_weights, str):
            values["step_weights"] = list(self.step_weights)
        return values

    def replace(self, **changes) -> "Choices":
        return replace(self, **changes)

    def weights(self, num_steps: int) -> list[float]:
        """The weight of each step's loss in the total (spec.md section 9, ``step_weights``)."""
        if self.step_weights == "uniform":
            return [1 / num_steps] * num_steps
        if isinstance(self.step_weights, str):
            decay = [0.8**k for k in range(num_steps)]
            return [w / sum(decay) for w in decay] if self.step_weights == "decay_normalized" else decay
        if len(self.step_weights) != num_steps:
            raise ValueError(f"step_weights has {len(self.step_weights)} entries; wanted num_steps, {num_steps}")
        return list(self.step_weights)

    def check(self, config: DraftConfig) -> None:
        """Refuse what these sizes cannot have. Raises ValueError."""
        self.weights(config.num_steps)
        if self.head != "reduced" and config.draft_vocab_size != config.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {config.draft_vocab_size} and vocab_size {config.vocab_size}; "
                f"a smaller draft vocabulary needs head 'reduced', not {self.head!r}"
            )


def _check_named(name: str, value) -> None:
    if isinstance(value, str) and value in REFUSED.get(name, {}):
        raise ValueError(
            f"{name} is {value!r}: {REFUSED[name][value]} is a known reading that is not computed here yet"
        )
    if value not in ALTERNATIVES[name] or type(value) is not type(ALTERNATIVES[name][0]):
        raise ValueError(f"{name} is {value!r}; wanted one of {', '.join(map(repr, ALTERNATIVES[name]))}")


def _checked_weights(value) -> tuple:
    try:
        weights = tuple(float(w) for w in value)
    except (TypeError, ValueError):
        weights = ()
    if not weights or not all(0 <= w < float("inf") for w in weights):
        raise ValueError(
            f"step_weights is {value!r}; wanted uniform, decay, decay_normalized or a list of numbers >= 0"
        )
    return weights


#: Where the three features may be taken (recorded, not computed: the step takes the arrays as given).
FEATURE_TAPS = (
    ("block_sum", "mixture"),
    ("block_sum", "mixture"),
    ("output_mixture", "output_mixture_normed", "block_sum"),
)


def _check_feature_tap(value) -> None:
    parts = value.split(",") if isinstance(value, str) else []
    if len(parts) != 3 or any(part not in allowed for part, allowed in zip(parts, FEATURE_TAPS, strict=True)):
        raise ValueError(f"feature_tap is {value!r}; wanted 'low,mid,high' with each of {FEATURE_TAPS}")


def parameter_shapes(config: DraftConfig, choices: Choices) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the step, in data order (spec.md section 2)."""
    c, d = config, config.hidden_size
    eagle3 = choices.draft_input == "eagle3"
    width = 2 * d if eagle3 else d  # of the attention's input
    heads, attn = c.num_attention_heads, "self_attn."
    shapes = {"embed_tokens.weight": (c.vocab_size, d), "fc.weight": (d, 3 * d)}
    if choices.feature_norm == "per_chunk":
        shapes |= {f"fc_norm.{i}.weight": (d,) for i in range(3)}
    if choices.feature_norm == "joint":
        shapes["fc_norm.weight"] = (3 * d,)
    shapes |= {"enorm.weight": (d,), "hnorm.weight": (d,)}
    if not eagle3:
        shapes |= {"eh_proj.weight": (d, 2 * d), "input_layernorm.weight": (d,)}
    shapes |= {
        attn + "q_a_proj.weight": (c.q_lora_rank, width),
        attn + "q_a_layernorm.weight": (c.q_lora_rank,),
        attn + "q_b_proj.weight": (heads * c.query_head_dim, c.q_lora_rank),
        attn + "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, width),
        attn + "kv_a_layernorm.weight": (c.kv_lora_rank,),
        attn + "kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        attn + "g_proj.weight": (heads * c.v_head_dim, width),
        attn + "o_proj.weight": (d, heads * c.v_head_dim),
        "post_attention_layernorm.weight": (d,),
    }
    shapes |= _dense_shapes(c) if eagle3 else _moe_shapes(c)
    rows = c.draft_vocab_size if choices.head == "reduced" else c.vocab_size
    return shapes | {"shared_head.norm.weight": (d,), "shared_head.head.weight": (rows, d)}


def _dense_shapes(c: DraftConfig) -> dict:
    d, m = c.hidden_size, c.intermediate_size
    return {"mlp.gate_proj.weight": (m, d), "mlp.up_proj.weight": (m, d), "mlp.down_proj.weight": (d, m)}


def _moe_shapes(c: DraftConfig) -> dict:
    d, lat, m, wide = c.hidden_size, c.routed_expert_hidden_size, c.moe_intermediate_size, c.shared_intermediate_size
    moe = "block_sparse_moe."
    shapes = {
        moe + "gate.weight": (c.num_experts, d),
        moe + "gate.e_score_correction_bias": (c.num_experts,),
        moe + "routed_expert_down_proj.weight": (lat, d),
    }
    for e in range(c.num_experts):
        shapes |= {expert_name(e, w): s for w, s in (("w1", (m, lat)), ("w3", (m, lat)), ("w2", (lat, m)))}
    return shapes | {
        moe + "routed_expert_norm.weight": (lat,),
        moe + "routed_expert_up_proj.weight": (d, lat),
        moe + "shared_experts.gate_proj.weight": (wide, d),
        moe + "shared_experts.up_proj.weight": (wide, d),
        moe + "shared_experts.down_proj.weight": (d, wide),
    }


def expert_name(expert: int, which: str) -> str:
    """The name of one expert's weight; ``which`` is w1 (gate), w3 (up) or w2 (down)."""
    return f"block_sparse_moe.experts.{expert}.{which}.weight"


def expert_of(name: str) -> tuple[str, int] | None:
    """Of an expert's weight the name of the stack of all experts' [E, out, in], and its place there; else None.

    ``block_sparse_moe.experts.3.w1.weight`` is number 3 of ``block_sparse_moe.experts.w1.weight``.
    """
    stem, _, rest = name.partition(".experts.")
    expert, _, kind = rest.partition(".")
    return (f"{stem}.experts.{kind}", int(expert)) if expert.isdigit() else None


def kind_of(name: str) -> str:
    """A parameter's name with the expert's number left out, as in ``block_sparse_moe.experts.*.w1.weight``."""
    expert = expert_of(name)
    return expert[0].replace(".experts.", ".experts.*.") if expert else name


#: Accepted and ignored: MTP checkpoints may ship them (spec.md section 2, ``draft_attn_res``).
IGNORED_PARAMETERS = tuple(
    f"{which}_res_{part}.weight" for which in ("self_attention", "mlp") for part in ("norm", "proj")
)


def frozen_parameters(choices: Choices) -> set[str]:
    """Names that receive no gradient (spec.md section 2; report section 4.1.4 and eq. 13)."""
    frozen = {"embed_tokens.weight", "block_sparse_moe.gate.e_score_correction_bias"}
    if choices.head == "frozen_target":
        frozen.add("shared_head.head.weight")
    if choices.trained == "freeze_head_norm":
        frozen.add("shared_head.norm.weight")
    return frozen


def trained_parameters(config: DraftConfig, choices: Choices) -> list[str]:
    """Names of the parameters that the step trains, in data order."""
    frozen = frozen_parameters(choices)
    return [name for name in parameter_shapes(config, choices) if name not in frozen]
