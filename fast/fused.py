"""The K-step unroll on the fused modules: the same step as ``fast.unroll``, for training rather than for reading.

What differs: products in the storage type with wide accumulation, weight gradients of all steps in one product
(``deferred``), experts quantised once per optimizer step (``experts``), attention without a map (``merged_attention``),
head and loss after the unroll (``linear_loss``), norms and activations that keep only their inputs (``pointwise``), and
recomputation where the caller asks for it.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftconf.reference.config import expert_of, frozen_parameters

from .deferred import Weight
from .experts import ExpertCache, Experts
from .fusion import embed, first_slots
from .layer import argmax_token
from .linear_loss import CHUNK_ROWS, linear_lk_total, times_transposed
from .loss import total_loss
from .merged_attention import attention
from .moe import MOE, mx_input, route
from .ops import keep, wide
from .pointwise import rms_norm, sigmoid_gate, situ_glu
from .unroll import check_inputs, inside_draft_vocabulary, recycle, sanitize, shift, step_inputs

RECOMPUTE = ("none", "attention", "step")
PRECISION = ("wide", "storage")
HEAD = "shared_head.head.weight"


@dataclass(frozen=True)
class Plan:
    """What to trade for memory and speed. Raises ValueError, naming the field, for an unknown value.

    recompute: ``attention`` computes each step's attention block anew in the backward pass, ``step`` each whole layer;
    keys and values of all steps are kept. With ``step`` weight gradients are summed step by step instead of once.
    attention, logits: in the ``wide`` type or in the ``storage`` type. The report keeps attention outputs in float32;
    bfloat16 logits put the loss's gradient off by tens of per cent, because q < p flips.
    """

    recompute: str = "none"
    attention: str = "wide"
    logits: str = "wide"

    def __post_init__(self):
        for field, known in (("recompute", RECOMPUTE), ("attention", PRECISION), ("logits", PRECISION)):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} is {getattr(self, field)!r}; wanted one of {', '.join(map(repr, known))}")


class Layer:
    """The draft layer of one unroll: weights with their tokens, norms in the wide type, quantised experts."""

    def __init__(self, params: dict, config, choices, plan: Plan, cache: ExpertCache | None = None):
        self.config, self.choices, self.plan = config, choices, plan
        self.table, self.head = params.get("embed_tokens.weight"), params.get(HEAD)
        self.dtype = next(p.dtype for name, p in params.items() if not name.endswith("bias"))
        self.bias = params.get(MOE + "gate.e_score_correction_bias")
        deferred, self.weights, self.norms = plan.recompute != "step", {}, {}
        for name, p in params.items():
            if p.ndim == 1:
                self.norms[name] = p.to(wide(p.dtype))  # so that the steps' gradients are summed wide
            elif not expert_of(name) and name not in (HEAD, "embed_tokens.weight"):
                self.weights[name] = Weight(p, deferred)
        has_experts = choices.draft_input == "mtp" and f"{MOE}experts.0.w1.weight" in params
        self.experts = Experts(params, config, choices, cache, deferred) if has_experts else None

    def precision(self, which: str) -> torch.dtype:
        return wide(self.dtype) if getattr(self.plan, which) == "wide" else self.dtype

    def linear(self, name: str, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.weights[name + ".weight"].linear(x, dtype)

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, self.norms[name + ".weight"], eps or self.config.rms_norm_eps)

    def glu(self, gate: Tensor, up: Tensor) -> Tensor:
        return situ_glu(gate, up, self.config.activation_situ_beta, self.config.activation_situ_linear_beta)

    def fusion(self, low: Tensor, mid: Tensor, high: Tensor) -> Tensor:
        """fc [low; mid; high], normed first as ``feature_norm`` says. All [B, T, d]."""
        parts = [low, mid, high]
        if self.choices.feature_norm == "per_chunk":
            parts = [self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)]
        joined = torch.cat(parts, dim=-1)  # [B, T, 3d]
        return self.linear("fc", self.norm("fc_norm", joined) if self.choices.feature_norm == "joint" else joined)

    def draft_input(self, embedding: Tensor, feature: Tensor, record=keep) -> Tensor:
        """eh_proj [RMSNorm(e); RMSNorm(f)], [B, T, d]; in layout eagle3 the join itself, [B, T, 2d]."""
        e = record("draft_input.enorm", self.norm("enorm", embedding))
        f = record("draft_input.hnorm", self.norm("hnorm", feature))
        x = torch.cat([e, f], dim=-1)  # [B, T, 2d]
        return record("draft_input", x if self.choices.draft_input == "eagle3" else self.linear("eh_proj", x))

    def mla(self, x: Tensor, documents: Tensor | None, record, *cached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gated attention before o_proj [B, T, H dv], key and value [B, T, H, .] of x [B, T, .].

        cached: keys of the earlier steps, then their values.
        """
        c, attn = self.config, "self_attn."
        low = record("mla_query.low", self.linear(attn + "q_a_proj", x))
        low = record("mla_query.norm", self.norm(attn + "q_a_layernorm", low, self.choices.latent_norm_eps))
        query = self.linear(attn + "q_b_proj", low).unflatten(-1, (c.num_attention_heads, c.query_head_dim))
        query = record("mla_query", query)
        key, value = self.key_value(x, record)
        half = len(cached) // 2
        keys, values = [*cached[:half], key], [*cached[half:], value]
        output = attention(query, keys, values, documents, self.precision("attention")).flatten(-2)
        pre = record("attn_gate.pre", self.linear(attn + "g_proj", x))
        return record("attn_gate", sigmoid_gate(pre, record("attention", output))), key, value

    def key_value(self, x: Tensor, record=keep) -> tuple[Tensor, Tensor]:
        """Key (nope, r) [B, T, H, dn+dr] and value [B, T, H, dv] of x [B, T, .]."""
        c, attn = self.config, "self_attn."
        latent = record("mla_latent", self.linear(attn + "kv_a_proj_with_mqa", x))
        low, r = latent.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        low = record("mla_keyvalue.norm", self.norm(attn + "kv_a_layernorm", low, self.choices.latent_norm_eps))
        both = self.linear(attn + "kv_b_proj", low).unflatten(-1, (c.num_attention_heads, -1))  # [B, T, H, dn+dv]
        nope, value = both.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        joined = torch.cat([nope, r.unsqueeze(-2).expand(*nope.shape[:-1], -1), value], dim=-1)
        return record("mla_keyvalue", joined).split([c.query_head_dim, c.v_head_dim], dim=-1)

    def mlp(self, x: Tensor, prefix: str, stage: str, record=keep) -> Tensor:
        """down_proj SiTU-GLU(gate_proj x, up_proj x). [B, T, d]."""
        gate = record(stage + ".gate", self.linear(prefix + "gate_proj", x))
        up = record(stage + ".up", self.linear(prefix + "up_proj", x))
        hidden = record(stage + ".hidden", self.glu(gate, up))
        return record(stage, self.linear(prefix + "down_proj", hidden))

    def moe(self, x: Tensor, experts: Tensor | None = None, record=keep) -> Tensor:
        """Shared experts plus the projected routed sum. [B, T, d]; ``experts`` [B, T, n] pins the routing."""
        scores = record("router_scores", torch.sigmoid(self.linear(MOE + "gate", x, wide(x.dtype))))
        weights, experts = route(scores, self.bias, self.config, self.choices, experts)
        weights = record("route", weights)
        record("experts", experts)
        z = record("latent_down", self.linear(MOE + "routed_expert_down_proj", x))
        combined = record("moe_combine", self.experts.combine(mx_input(z, self.choices, record), weights, experts))
        latent = record("latent_norm", self.norm(MOE + "routed_expert_norm", combined))
        shared = self.mlp(x, MOE + "shared_experts.", "shared_experts", record)
        return shared + self.linear(MOE + "routed_expert_up_proj", latent)

    def feed_forward(self, x: Tensor, experts: Tensor | None = None, record=keep) -> Tensor:
        """x plus the sparse block (eagle3: the dense MLP) of its norm. [B, T, d]."""
        h = record("moe_norm", self.norm("post_attention_layernorm", x))
        eagle3 = self.choices.draft_input == "eagle3"
        added = self.mlp(h, "mlp.", "dense_mlp", record) if eagle3 else self.moe(h, experts, record)
        return record("layer_output", x + added)

    def step(self, feature, embedding, documents, experts, record, *cached) -> tuple[Tensor, Tensor, Tensor]:
        """The next feature [B, T, d], key and value [B, T, H, .]. cached: earlier keys, then earlier values."""
        x = self.draft_input(embedding, feature, record)
        if self.choices.draft_input == "eagle3":
            a, residual = x, feature
        else:
            a, residual = record("attn_norm", self.norm("input_layernorm", x)), x
        mla = partial(_again, self.mla) if self.plan.recompute == "attention" else self.mla
        gated, key, value = mla(a, documents, record, *cached)
        x = record("attn_output", residual + self.linear("self_attn.o_proj", gated))
        return self.feed_forward(x, experts, record), key, value

    def head_norm(self, feature: Tensor, record=keep) -> Tensor:
        return record("head_norm", self.norm("shared_head.norm", feature))


def _again(function, *args):
    """Keep the arguments only and compute the function anew in the backward pass."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def unroll(
    params: dict,
    inputs: dict,
    config,
    choices,
    record=keep,
    forced: dict | None = None,
    counts=None,
    plan: Plan | None = None,
    cache: ExpertCache | None = None,
) -> dict:
    """``fast.unroll.unroll`` on the fused modules: the same arguments and results.

    The gradient flows from total_loss only, and is made for one backward pass. ``record`` sees the boundaries that
    exist: not those inside the experts, nor logits and lk_loss. ``cache`` keeps quantised experts between calls.
    """
    plan, forced, inputs = plan or Plan(), forced or {}, sanitize(inputs)
    check_inputs(inputs, config.vocab_size)
    layer = Layer(params, config, choices, plan, cache)
    normed = run_steps(layer, inputs, _once(record), forced)
    supervised = supervised_slots(inputs, config, choices)
    shares = slot_shares(supervised, choices, config.num_steps, counts, wide(layer.dtype))
    total, slot_losses = linear_lk_total(
        torch.stack(normed).flatten(1, 2),
        inputs["target_logits"].flatten(0, 1),
        layer.head.detach() if HEAD in frozen_parameters(choices) else layer.head,
        shares.flatten(1),
        target_shift=choices.target_alignment == "shifted",
        draft_to_target=inputs.get("draft_to_target"),
        reduced_target=choices.reduced_target,
        logits="bfloat16" if layer.precision("logits") == torch.bfloat16 else "float32",
    )
    slot_losses = slot_losses.view(supervised.shape)
    weights = choices.weights(config.num_steps)
    _, step_losses = total_loss(slot_losses, supervised, weights, choices.reduction, counts)
    return {"total_loss": total, "step_losses": step_losses, "slot_losses": slot_losses, "supervised": supervised}


def run_steps(layer: Layer, inputs: dict, record, forced: dict) -> list[Tensor]:
    """The K normed hidden states [B, T, d]."""
    choices, documents, keys, values, normed = layer.choices, inputs.get("documents"), [], [], []
    feature = record("1/fusion", layer.fusion(inputs["low"], inputs["mid"], inputs["high"]))
    slots = without_targets(inputs)
    for k in range(1, layer.config.num_steps + 1):
        at_step = partial(_at_step, record, k)
        tokens, _, _ = step_inputs(slots, k, choices)
        if choices.token_source == "own" and k > 1:
            tokens = forced.get(f"{k}/tokens", own_tokens(layer, normed[-1], inputs.get("draft_to_target")))
            at_step("tokens", tokens)
        zero = first_slots(tokens, documents) if choices.zero_first_embedding and k == 1 else None
        embedding = at_step("embed", embed(tokens, layer.table, zero))
        step = partial(_again, layer.step) if layer.plan.recompute == "step" else layer.step
        feature, key, value = step(feature, embedding, documents, forced.get(f"{k}/experts"), at_step, *keys, *values)
        keys, values = [*keys, key], [*values, value]
        normed.append(layer.head_norm(feature, at_step))
        feature = recycle(feature, normed[-1], choices)
    return normed


def without_targets(inputs: dict) -> dict:
    """The inputs with one column of the target logits: shifting all of them would copy them at every step."""
    return {**inputs, "target_logits": inputs["target_logits"][..., :1]}


def supervised_slots(inputs: dict, config, choices) -> Tensor:
    """Which slots count at which step, bool [K, B, T], of sanitised inputs."""
    slots, steps = without_targets(inputs), range(1, config.num_steps + 1)
    masks = [step_inputs(slots, k, choices)[2] for k in steps]
    if choices.reduced_supervision == "argmax_inside":
        inside = inside_draft_vocabulary(inputs["target_logits"], inputs["draft_to_target"])
        fixed = choices.target_alignment == "fixed"
        masks = [m & (inside if fixed else shift(inside, k - 1, False)) for k, m in zip(steps, masks, strict=True)]
    return torch.stack(masks)


@torch.no_grad()
def own_tokens(layer: Layer, normed: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """The target id of each slot's largest logit, from a chunk of logits at a time. [B, T, d] -> int64 [B, T]."""
    found = []
    for h in normed.flatten(0, 1).split(CHUNK_ROWS):
        logits = h.new_empty((len(h), len(layer.head)), dtype=layer.precision("logits"))
        found.append(argmax_token(times_transposed(h, layer.head, logits), draft_to_target))
    return torch.cat(found).view(normed.shape[:2])


def slot_shares(supervised: Tensor, choices, num_steps: int, counts, dtype: torch.dtype) -> Tensor:
    """What each slot's loss counts in the total, [K, B, T], as ``fast.loss.total_loss`` weighs it."""
    counts = slot_counts(supervised, choices) if counts is None else counts
    counts = torch.as_tensor(counts, device=supervised.device).clamp(min=1).to(dtype)
    share = torch.tensor(choices.weights(num_steps), dtype=dtype, device=supervised.device) / counts  # [K]
    return torch.where(supervised, share[:, None, None], 0)


def slot_counts(supervised: Tensor, choices) -> Tensor:
    """What each step's sum of losses is divided by, int64 [K]: supervised slots, or B T with "all_slots"."""
    slots = supervised if choices.reduction == "supervised" else torch.ones_like(supervised)
    return slots.sum((1, 2))


def _at_step(record, step: int, name: str, x: Tensor) -> Tensor:
    return record(f"{step}/{name}", x)


def _once(record):
    """A recorder that is called once a name: recomputation passes by again."""
    if record is keep:
        return record
    seen = set()

    def first_only(name: str, x: Tensor) -> Tensor:
        if name in seen:
            return x
        seen.add(name)
        return record(name, x)

    return first_only
