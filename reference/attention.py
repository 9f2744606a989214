"""Gated multi-head latent attention without position encoding, with one more own key per unrolled step.

Report sections 2.1.2 (NoPE, output gate, eq. 7) and 4.1.4 (the unroll); spec.md section 4. Slot j of step k attends the
step-1 keys of slots i <= j of its document and, for steps 2..k, only its own slot's key of each step: the same keys as
when drafting one token after another with a cache.
"""

import numpy as np

from .config import DraftConfig
from .formats import store
from .ops import Op, linear, linear_backward, no_gradient, rms_norm, rms_norm_backward, sigmoid, softmax


def split_heads(x, heads: int):
    """[B, T, H n] -> [B, T, H, n]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x):
    """[B, T, H, n] -> [B, T, H n], head-major."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def mla_query(heads: int) -> Op:
    """q = q_b_proj(normed), per head. [B, T, q_lora] -> [B, T, H, dn + dr]."""

    def backward(x, weight, y, d_y):
        return linear_backward(x, weight, merge_heads(d_y))

    return Op(lambda x, weight: split_heads(linear(x, weight), heads), backward)


def latent_norm(kv_lora_rank: int, eps: float) -> Op:
    """RMSNorm of the first kv_lora_rank features of [c; r]; r passes by. -> [B, T, kv_lora]."""

    def backward(latent, weight, y, d_y):
        d_c, d_weight = rms_norm_backward(latent[..., :kv_lora_rank], weight, eps, d_y)
        return np.concatenate([d_c, np.zeros_like(latent[..., kv_lora_rank:])], axis=-1), d_weight

    return Op(lambda latent, weight: rms_norm(latent[..., :kv_lora_rank], weight, eps), backward)


def mla_keyvalue(config: DraftConfig) -> Op:
    """Per head key [k_nope; r] then value, from kv_b_proj(normed c) and the shared r. -> [B, T, H, dn + dr + dv]."""
    heads, dn, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank

    def forward(normed, latent, weight):
        kv = split_heads(linear(normed, weight), heads)  # [B, T, H, dn + dv]
        r = latent[..., None, rank:]  # [B, T, 1, dr]
        r = np.broadcast_to(r, (*kv.shape[:-1], r.shape[-1]))  # never rotated: NoPE
        return np.concatenate([kv[..., :dn], r, kv[..., dn:]], axis=-1)

    def backward(normed, latent, weight, y, d_y):
        dr = latent.shape[-1] - rank
        d_kv = np.concatenate([d_y[..., :dn], d_y[..., dn + dr :]], axis=-1)
        d_normed, d_weight = linear_backward(normed, weight, merge_heads(d_kv))
        d_r = d_y[..., dn : dn + dr].sum(axis=-2)  # every head reads the same r
        return d_normed, np.concatenate([np.zeros_like(latent[..., :rank]), d_r], axis=-1), d_weight

    return Op(forward, backward)


def split_keyvalue(keyvalue, config: DraftConfig):
    """[B, T, H, dn + dr + dv] -> key [B, T, H, dn + dr], value [B, T, H, dv]."""
    return keyvalue[..., : config.query_head_dim], keyvalue[..., config.query_head_dim :]


def visible(documents: np.ndarray) -> np.ndarray:
    """Step-1 slots each slot may read: earlier or own, same document; padding (-1) reads itself only. [B, T, T]."""
    same = documents[:, :, None] == documents[:, None, :]
    slots = np.arange(documents.shape[1])
    own = slots[:, None] == slots[None, :]
    return (same & (documents[:, :, None] >= 0) & (slots[:, None] >= slots[None, :])) | own


def _heads_first(x):
    return np.swapaxes(x, 1, 2)  # [B, T, H, n] <-> [B, H, T, n]


def _probabilities(query, keys, documents):
    """Softmax over the T step-1 scores, then the k-1 own scores. [B, H, T, T + k - 1]."""
    scale = query.shape[-1] ** -0.5
    q = _heads_first(query)
    scores = q @ np.swapaxes(_heads_first(keys[0]), -1, -2) * scale  # [B, H, T, T]
    scores = np.where(visible(documents)[:, None], store(scores, "attention_scores"), -np.inf)
    own = [np.sum(q * _heads_first(key), axis=-1, keepdims=True) * scale for key in keys[1:]]
    return softmax(np.concatenate([scores, *(store(s, "attention_scores") for s in own)], axis=-1))


def attention(query, keys, values, documents):
    """query [B, T, H, n], keys and values k arrays [B, T, H, .], documents [B, T] -> [B, T, H, dv]."""
    slots = query.shape[1]
    p = store(_probabilities(query, keys, documents), "attention_probabilities")
    out = p[..., :slots] @ _heads_first(values[0])
    for i, value in enumerate(values[1:]):
        out = out + p[..., slots + i : slots + i + 1] * _heads_first(value)
    return _heads_first(out)


def attention_backward(query, keys, values, documents, output, d_output):
    """With P the probabilities, D = sum(d_o o): d_P = d_o V^T, d_S = P (d_P - D), scaled; then as any product.

    The own-step columns of P and S are products of a slot with itself. Returns d_query, [d_key], [d_value].
    """
    slots, scale = query.shape[1], query.shape[-1] ** -0.5
    q, d_o = _heads_first(query), _heads_first(d_output)
    k, v = [_heads_first(x) for x in keys], [_heads_first(x) for x in values]
    p = store(_probabilities(query, keys, documents), "attention_probabilities")  # [B, H, T, T + k - 1]
    own = [np.sum(d_o * value, axis=-1, keepdims=True) for value in v[1:]]
    d_p = store(np.concatenate([d_o @ np.swapaxes(v[0], -1, -2), *own], axis=-1), "attention_probabilities")
    dot = np.sum(d_o * _heads_first(output), axis=-1, keepdims=True)
    d_s = store(p * (d_p - dot), "attention_scores") * scale
    d_q = d_s[..., :slots] @ k[0]
    d_keys = [np.swapaxes(d_s[..., :slots], -1, -2) @ q]
    d_values = [np.swapaxes(p[..., :slots], -1, -2) @ d_o]
    for i, key in enumerate(k[1:], start=slots):
        d_q = d_q + d_s[..., i : i + 1] * key
        d_keys.append(d_s[..., i : i + 1] * q)
        d_values.append(p[..., i : i + 1] * d_o)
    return _heads_first(d_q), [_heads_first(d) for d in d_keys], [_heads_first(d) for d in d_values]


def attention_op(config: DraftConfig) -> Op:
    """Inputs: documents, query, then the ``mla_keyvalue`` of steps 1..k. Output head-major [B, T, H dv]."""

    def forward(documents, query, *keyvalues):
        keys, values = zip(*(split_keyvalue(kv, config) for kv in keyvalues), strict=True)
        return merge_heads(attention(query, keys, values, documents))

    def backward(documents, query, *rest):
        *keyvalues, y, d_y = rest
        keys, values = zip(*(split_keyvalue(kv, config) for kv in keyvalues), strict=True)
        heads = config.num_attention_heads
        y, d_y = split_heads(y, heads), split_heads(d_y, heads)
        d_query, d_keys, d_values = attention_backward(query, keys, values, documents, y, d_y)
        joined = (np.concatenate(pair, axis=-1) for pair in zip(d_keys, d_values, strict=True))
        return None, d_query, *joined

    return Op(forward, backward)


def gated(pre, attended):
    """o <- sigmoid(g_proj a) * o, per channel (report eq. 7). Two [B, T, H dv] -> [B, T, H dv]."""
    return store(sigmoid(pre), "gate") * attended


def gated_backward(pre, attended, y, d_y):
    """d_pre = d_y o s (1 - s); d_o = d_y s."""
    s = store(sigmoid(pre), "gate")
    return d_y * attended * s * (1.0 - s), d_y * s


GATED = Op(gated, gated_backward)


def attn_output(residual, attended, o_proj):
    """x1 = residual + o_proj o. -> [B, T, d]."""
    return residual + store(linear(attended, o_proj))


def attn_output_backward(residual, attended, o_proj, y, d_y):
    return d_y, *linear_backward(attended, o_proj, d_y)


ATTN_OUTPUT = Op(attn_output, attn_output_backward)


def cached_attention_op(config: DraftConfig) -> Op:
    """One anchor slot against its cache: the step-1 keys of every slot up to it, then its own key of each step.

    Inputs: documents (unread), query [1, 1, H, .], then the ``mla_keyvalue`` of step 1 [1, T, H, .] and of steps 2..k
    [1, 1, H, .]. The serial form that the unroll's attention must equal; it has no backward.
    """

    def forward(documents, query, *keyvalues):
        keys, values = split_keyvalue(np.concatenate(keyvalues, axis=1), config)  # [1, T + k - 1, H, .]
        q, k, v = _heads_first(query), _heads_first(keys), _heads_first(values)
        p = softmax(q @ np.swapaxes(k, -1, -2) * query.shape[-1] ** -0.5)
        return merge_heads(_heads_first(p @ v))

    return Op(forward, no_gradient)
