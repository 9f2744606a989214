"""The wiring: every stage of every unrolled step, in data order, under the names of spec.md section 4.

Dotted names are the finer boundaries inside a stage (``mla_query.low``). Step 0 holds what is computed once: the expert
weights on the MXFP4 grid. ``x`` of the table below is a key of the same step; ``feature`` is the fused feature at step
1 and the draft's own output of the step before after that.
"""

from collections.abc import Mapping

import numpy as np

from . import attention, fusion, loss, moe, mx
from .config import Choices, DraftConfig, expert_name
from .graph import Key, Node
from .ops import LINEAR, Op, no_gradient, norm, situ

#: The stack of all experts' weights of one kind, [E, out, in].
EXPERT_WEIGHTS = {w: f"block_sparse_moe.experts.{w}.weight" for w in ("w1", "w2", "w3")}


def stacked_experts(arrays: Mapping, experts: int) -> dict:
    """The experts' weights that are among ``arrays``, stacked under the names of ``EXPERT_WEIGHTS``."""
    return {
        stack: np.stack([arrays[expert_name(e, w)] for e in range(experts)])
        for w, stack in EXPERT_WEIGHTS.items()
        if expert_name(0, w) in arrays
    }


def feature_key(step: int, choices: Choices) -> Key:
    """Where step ``step`` reads its feature."""
    if step == 1:
        return (1, "fusion")
    return (step - 1, "layer_output" if choices.recycled_feature == "pre_norm" else "head_norm")


def graph(config: DraftConfig, choices: Choices, steps: int | None = None) -> list[Node]:
    """All nodes of the unroll, in data order."""
    eagle3, count = choices.draft_input == "eagle3", steps or config.num_steps
    nodes = [] if eagle3 else expert_weight_nodes(choices)
    for step in range(1, count + 1):
        nodes += step_nodes(config, choices, step)
    losses = tuple((step, "step_loss") for step in range(1, count + 1))
    weights = choices.weights(config.num_steps)[:count]
    return [*nodes, Node((0, "total_loss"), loss.total_loss(weights), losses)]


def step_nodes(config: DraftConfig, choices: Choices, step: int) -> list[Node]:
    """One step from its tokens to its loss."""
    mlp = dense_nodes if choices.draft_input == "eagle3" else moe_nodes
    return [
        *input_nodes(config, choices, step),
        *attention_nodes(config, choices, step),
        *mlp(config, choices, step),
        *loss_nodes(config, choices, step),
    ]


def expert_weight_nodes(choices: Choices) -> list[Node]:
    fp4 = mx.straight_through("mxfp4", choices.mx_scale_rule, choices.quantize_source, choices.ste)
    return [Node((0, f"expert_weights.{w}"), fp4, (name,)) for w, name in EXPERT_WEIGHTS.items()]


def rows(step: int, detached: tuple[Key, ...], table: list) -> list[Node]:
    """Rows of (stage, op, *inputs); an input that names a stage of this step is a plain string starting with a dot."""
    at = lambda name: (step, name[1:]) if isinstance(name, str) and name.startswith(".") else name  # noqa: E731
    return [
        Node((step, stage), op, tuple(map(at, inputs)), tuple(key for key in detached if key in inputs))
        for stage, op, *inputs in table
    ]


def input_nodes(config: DraftConfig, choices: Choices, step: int) -> list[Node]:
    """Embedding, feature, and what the layer reads."""
    eps, feature = config.rms_norm_eps, feature_key(step, choices)
    zeroed = ("first_slots",) if choices.zero_first_embedding and step == 1 else ()
    table = [("embed", fusion.EMBED, ".tokens", "embed_tokens.weight", *zeroed)]
    if choices.token_source == "own" and step > 1:
        table.insert(0, ("tokens", OWN_TOKENS, (step - 1, "logits"), "draft_to_target"))
    if step == 1:
        names = fusion.feature_norm_names(choices)
        table.append(("fusion", fusion.fusion_op(choices, eps), "low", "mid", "high", "fc.weight", *names))
    projection = () if choices.draft_input == "eagle3" else ("eh_proj.weight",)
    table += [
        ("draft_input.enorm", norm(eps), ".embed", "enorm.weight"),
        ("draft_input.hnorm", norm(eps), feature, "hnorm.weight"),
        ("draft_input", fusion.draft_input_op(choices), ".draft_input.enorm", ".draft_input.hnorm", *projection),
    ]
    return rows(step, detached_feature(step, choices), table)


def detached_feature(step: int, choices: Choices) -> tuple[Key, ...]:
    """``detach_between_steps`` cuts the recycled feature only, not earlier keys and values."""
    return (feature_key(step, choices),) if choices.detach_between_steps and step > 1 else ()


def own_tokens(logits, draft_to_target):
    """The arg-max of the slot's logits of the step before, lowest id on ties, as a target id. int [B, T]."""
    ids = np.argmax(np.real(logits), axis=-1)
    return ids if draft_to_target is None else draft_to_target[ids]


OWN_TOKENS = Op(own_tokens, no_gradient)


def attention_nodes(config: DraftConfig, choices: Choices, step: int) -> list[Node]:
    """Gated NoPE MLA, from ``draft_input`` to ``attn_output``. In eagle3 it reads ``draft_input`` itself."""
    eagle3, heads, attn = choices.draft_input == "eagle3", config.num_attention_heads, "self_attn."
    a = ".draft_input" if eagle3 else ".attn_norm"
    residual = feature_key(step, choices) if eagle3 else ".draft_input"
    keyvalues = [(i, "mla_keyvalue") for i in range(1, step + 1)]
    small = norm(choices.latent_norm_eps)
    latent_norm = attention.latent_norm(config.kv_lora_rank, choices.latent_norm_eps)
    table = [
        ("attn_norm", norm(config.rms_norm_eps), ".draft_input", "input_layernorm.weight"),
        ("mla_query.low", LINEAR, a, attn + "q_a_proj.weight"),
        ("mla_query.norm", small, ".mla_query.low", attn + "q_a_layernorm.weight"),
        ("mla_query", attention.mla_query(heads), ".mla_query.norm", attn + "q_b_proj.weight"),
        ("mla_latent", LINEAR, a, attn + "kv_a_proj_with_mqa.weight"),
        ("mla_keyvalue.norm", latent_norm, ".mla_latent", attn + "kv_a_layernorm.weight"),
        (
            "mla_keyvalue",
            attention.mla_keyvalue(config),
            ".mla_keyvalue.norm",
            ".mla_latent",
            attn + "kv_b_proj.weight",
        ),
        ("attention", attention.attention_op(config), "documents", ".mla_query", *keyvalues),
        ("attn_gate.pre", LINEAR, a, attn + "g_proj.weight"),
        ("attn_gate", attention.GATED, ".attn_gate.pre", ".attention"),
        ("attn_output", attention.ATTN_OUTPUT, residual, ".attn_gate", attn + "o_proj.weight"),
    ]
    return rows(step, detached_feature(step, choices), table[eagle3:])


def glu_rows(stage: str, source: str, prefix: str, config: DraftConfig) -> list:
    """down_proj SiTU-GLU(gate_proj h, up_proj h)."""
    activation = situ(config.activation_situ_beta, config.activation_situ_linear_beta)
    return [
        (f"{stage}.gate", LINEAR, source, prefix + "gate_proj.weight"),
        (f"{stage}.up", LINEAR, source, prefix + "up_proj.weight"),
        (f"{stage}.hidden", activation, f".{stage}.gate", f".{stage}.up"),
        (stage, LINEAR, f".{stage}.hidden", prefix + "down_proj.weight"),
    ]


def dense_nodes(config: DraftConfig, choices: Choices, step: int) -> list[Node]:
    """The unquantised MLP of layout eagle3."""
    table = [
        ("moe_norm", norm(config.rms_norm_eps), ".attn_output", "post_attention_layernorm.weight"),
        *glu_rows("dense_mlp", ".moe_norm", "mlp.", config),
        ("layer_output", moe.ADD, ".attn_output", ".dense_mlp"),
    ]
    return rows(step, (), table)


def moe_nodes(config: DraftConfig, choices: Choices, step: int) -> list[Node]:
    """Stable LatentMoE with MX experts."""
    moe_ = "block_sparse_moe."
    table = [
        ("moe_norm", norm(config.rms_norm_eps), ".attn_output", "post_attention_layernorm.weight"),
        ("router_scores", moe.ROUTER_SCORES, ".moe_norm", moe_ + "gate.weight"),
        ("experts", top_experts(config), ".router_scores", moe_ + "gate.e_score_correction_bias"),
        ("route", route(config, choices), ".router_scores", ".experts"),
        ("latent_down", LINEAR, ".moe_norm", moe_ + "routed_expert_down_proj.weight"),
        *expert_rows(config, choices),
        ("latent_norm", norm(config.rms_norm_eps), ".moe_combine", moe_ + "routed_expert_norm.weight"),
        *glu_rows("shared_experts", ".moe_norm", moe_ + "shared_experts.", config),
        ("layer_output", moe.LAYER_OUTPUT, ".attn_output", ".shared_experts", ".latent_norm",
         moe_ + "routed_expert_up_proj.weight"),
    ]  # fmt: skip
    return rows(step, (), table)


def top_experts(config: DraftConfig) -> Op:
    return Op(lambda s, bias: moe.top_experts(s, bias, config.num_experts_per_token), no_gradient)


def route(config: DraftConfig, choices: Choices) -> Op:
    return moe.route_op(config.routed_scaling_factor, choices.renormalize_epsilon)


def expert_rows(config: DraftConfig, choices: Choices) -> list:
    """From the latent to the combined expert output."""
    fp8 = mx.straight_through(
        f"mxfp8_{choices.mxfp8_element}", choices.mx_scale_rule, choices.quantize_source, choices.ste
    )
    activation = situ(config.activation_situ_beta, config.activation_situ_linear_beta)
    before = choices.routing_weight == "before_down"
    hidden, table = ".expert_hidden", []
    if before:
        table.append(("expert_weighted", moe.WEIGHTED, hidden, ".route"))
        hidden = ".expert_weighted"
    if choices.quantize_hidden:
        table.append(("mx_hidden", fp8, hidden))
        hidden = ".mx_hidden"
    combine = (moe.PLAIN_SUM, ".expert_output") if before else (moe.COMBINE, ".expert_output", ".route")
    return [
        ("mx_input", fp8, ".latent_down"),
        ("expert_hidden.gate", moe.FIRST_PRODUCT, ".mx_input", ".experts", (0, "expert_weights.w1")),
        ("expert_hidden.up", moe.FIRST_PRODUCT, ".mx_input", ".experts", (0, "expert_weights.w3")),
        ("expert_hidden", activation, ".expert_hidden.gate", ".expert_hidden.up"),
        *table,
        ("expert_output", moe.SECOND_PRODUCT, hidden, ".experts", (0, "expert_weights.w2")),
        ("moe_combine", *combine),
    ]


def loss_nodes(config: DraftConfig, choices: Choices, step: int) -> list[Node]:
    table = [
        ("head_norm", norm(config.rms_norm_eps), ".layer_output", "shared_head.norm.weight"),
        ("logits", LINEAR, ".head_norm", "shared_head.head.weight"),
        ("target_log_probs", loss.target_op(choices.reduced_target), ".target_logits", "draft_to_target"),
        ("lk_loss", loss.LK_LOSS, ".logits", ".target_log_probs"),
        ("step_loss", loss.step_loss(choices.reduction), ".lk_loss", ".supervised"),
    ]
    return rows(step, (), table)
