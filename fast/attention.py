"""Gated multi-head latent attention without positions, over keys that grow with the steps (spec.md section 4)."""

import torch
from torch import Tensor

from .ops import keep, linear, rms_norm, wide


def mla_query(x: Tensor, params: dict, config, choices, record=keep) -> Tensor:
    """q_b_proj RMSNorm(q_a_proj x). x [B, T, .] -> [B, T, H, dn+dr]."""
    low = record("mla_query.low", linear(x, params["self_attn.q_a_proj.weight"]))  # [B, T, q_lora]
    norm = rms_norm(low, params["self_attn.q_a_layernorm.weight"], choices.latent_norm_eps)
    query = linear(record("mla_query.norm", norm), params["self_attn.q_b_proj.weight"])
    return record("mla_query", query.unflatten(-1, (config.num_attention_heads, config.query_head_dim)))


def mla_latent(x: Tensor, params: dict, record=keep) -> Tensor:
    """[c; r] = kv_a_proj_with_mqa x. x [B, T, .] -> [B, T, kv_lora+dr]; r is shared by all heads, never rotated."""
    return record("mla_latent", linear(x, params["self_attn.kv_a_proj_with_mqa.weight"]))


def mla_keyvalue(latent: Tensor, params: dict, config, choices, record=keep) -> tuple[Tensor, Tensor]:
    """Key (nope, r) [B, T, H, dn+dr] and value [B, T, H, dv] of latent [B, T, kv_lora+dr]."""
    c, r = latent.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    norm = rms_norm(c, params["self_attn.kv_a_layernorm.weight"], choices.latent_norm_eps)
    both = linear(record("mla_keyvalue.norm", norm), params["self_attn.kv_b_proj.weight"])
    both = both.unflatten(-1, (config.num_attention_heads, -1))  # [B, T, H, dn+dv]
    nope, value = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
    r = r.unsqueeze(-2).expand(*nope.shape[:-1], -1)  # [B, T, H, dr]
    both = record("mla_keyvalue", torch.cat([nope, r, value], dim=-1))  # [B, T, H, dn+dr+dv]
    return both.split([config.query_head_dim, config.v_head_dim], dim=-1)


def visible(num_slots: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Which step-1 keys a slot may see, bool [B or 1, T, T]: those up to itself in its document.

    A padding slot (document -1) sees itself only, so that its softmax is defined, and is seen by no other slot.
    """
    causal = torch.ones(num_slots, num_slots, dtype=torch.bool, device=device).tril().unsqueeze(0)
    if documents is None:
        return causal
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # [B, T, T]
    same = same & (documents != -1).unsqueeze(-1)
    return (causal & same) | torch.eye(num_slots, dtype=torch.bool, device=device)


def attention(query: Tensor, keys, values, documents: Tensor | None = None) -> Tensor:
    """One softmax over the visible step-1 keys and the slot's own key of each later step.

    query [B, T, H, D]; keys and values, lists or stacks, [k, B, T, H, .] -> [B, T, H, dv] in the wide type, in which
    the report keeps it (section 2.1.2). Scale D^-1/2.
    """
    compute = wide(query.dtype)
    query = query.to(compute)
    scores = torch.einsum("bthd,bshd->bths", query, keys[0].to(compute))  # [B, T, H, T]
    hidden = ~visible(query.shape[1], documents, query.device).unsqueeze(2)  # [B or 1, T, 1, T]
    scores = scores.masked_fill(hidden, -torch.inf)
    own = [(query * key.to(compute)).sum(-1, keepdim=True) for key in keys[1:]]  # each [B, T, H, 1]
    scores = torch.cat([scores, *own], dim=-1) * query.shape[-1] ** -0.5  # [B, T, H, T+k-1]
    probs = torch.softmax(scores, dim=-1)
    num_slots = query.shape[1]
    output = torch.einsum("bths,bshv->bthv", probs[..., :num_slots], values[0].to(compute))
    for i, value in enumerate(values[1:]):
        output = output + probs[..., num_slots + i, None] * value.to(compute)
    return output  # [B, T, H, dv]


def attention_cached(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same for one query that sees the whole cache. query [H, D], keys and values [n, H, .] -> [H, dv]."""
    compute = wide(query.dtype)
    scores = torch.einsum("hd,nhd->hn", query.to(compute), keys.to(compute)) * query.shape[-1] ** -0.5
    return torch.einsum("hn,nhv->hv", torch.softmax(scores, dim=-1), values.to(compute))


def attn_gate(x: Tensor, output: Tensor, params: dict, record=keep) -> Tensor:
    """sigmoid(g_proj x) * output per channel (report eq. 7). x [B, T, .], output [B, T, H*dv] -> [B, T, H*dv]."""
    pre = record("attn_gate.pre", linear(x, params["self_attn.g_proj.weight"]))
    return record("attn_gate", (torch.sigmoid(pre.to(output.dtype)) * output).to(x.dtype))


def attn_output(gated: Tensor, params: dict, residual: Tensor, record=keep) -> Tensor:
    """residual + o_proj gated, rounded once. gated [B, T, H*dv], residual [B, T, d] -> [B, T, d]."""
    projected = linear(gated, params["self_attn.o_proj.weight"], wide(gated.dtype))
    return record("attn_output", (residual + projected).to(residual.dtype))


def mla(x, params, config, choices, keys=(), values=(), documents=None, record=keep) -> tuple[Tensor, Tensor, Tensor]:
    """The gated attention before ``o_proj`` [B, T, H*dv], and this step's key and value, of x [B, T, .].

    keys and values hold those of the earlier steps, each [B, T, H, .].
    """
    query = mla_query(x, params, config, choices, record)
    key, value = mla_keyvalue(mla_latent(x, params, record), params, config, choices, record)
    output = attention(query, [*keys, key], [*values, value], documents).flatten(-2)
    return attn_gate(x, record("attention", output), params, record), key, value
