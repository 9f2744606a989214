"""The draft layer and its head (spec.md section 4)."""

import torch
from torch import Tensor

from .attention import attn_output, mla
from .fusion import draft_input, embed
from .moe import dense_mlp, moe
from .ops import keep, linear, rms_norm, wide


def attention_input(embedding: Tensor, feature: Tensor, params, config, choices, record=keep) -> tuple[Tensor, Tensor]:
    """What the attention reads [B, T, d or 2d], and the residual [B, T, d] that its output is added to."""
    x = draft_input(embedding, feature, params, config, choices, record)
    if choices.draft_input == "eagle3":
        return x, feature
    return record("attn_norm", rms_norm(x, params["input_layernorm.weight"], config.rms_norm_eps)), x


def feed_forward(x: Tensor, params: dict, config, choices, quantized=None, experts=None, record=keep) -> Tensor:
    """x plus the sparse block (eagle3: the dense MLP) of its norm, rounded once. [B, T, d] -> [B, T, d]."""
    h = record("moe_norm", rms_norm(x, params["post_attention_layernorm.weight"], config.rms_norm_eps))
    if choices.draft_input == "eagle3":
        added = dense_mlp(h, params, config, record).to(wide(x.dtype))
    else:
        added = moe(h, params, config, choices, quantized, experts, record)
    return record("layer_output", (x + added).to(x.dtype))


def draft_layer(
    feature: Tensor,
    tokens: Tensor,
    params: dict,
    config,
    choices,
    keys=(),
    values=(),
    documents: Tensor | None = None,
    quantized: dict | None = None,
    experts: Tensor | None = None,
    zero: Tensor | None = None,
    record=keep,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next step's feature [B, T, d], and this step's key and value [B, T, H, .].

    feature [B, T, d], tokens [B, T]; keys and values of the earlier steps, each [B, T, H, .]; ``zero`` bool [B, T]
    marks embeddings to be zeroed, ``quantized`` and ``experts`` are those of ``moe``.
    """
    embedding = record("embed", embed(tokens, params["embed_tokens.weight"], zero))
    a, residual = attention_input(embedding, feature, params, config, choices, record)
    gated, key, value = mla(a, params, config, choices, keys, values, documents, record)
    x = attn_output(gated, params, residual, record)
    return feed_forward(x, params, config, choices, quantized, experts, record), key, value


def head_norm(feature: Tensor, params: dict, config, record=keep) -> Tensor:
    """RMSNorm of the layer's output before the head. [..., d]."""
    return record("head_norm", rms_norm(feature, params["shared_head.norm.weight"], config.rms_norm_eps))


def logits(normed: Tensor, params: dict, record=keep) -> Tensor:
    """shared_head.head normed, kept wide. [..., d] -> [..., V or draft vocabulary]."""
    return record("logits", linear(normed, params["shared_head.head.weight"], wide(normed.dtype)))


def head(feature: Tensor, params: dict, config, record=keep) -> Tensor:
    """Logits [..., V or draft vocabulary] of the layer's output [..., d]."""
    return logits(head_norm(feature, params, config, record), params, record)


def argmax_token(scores: Tensor, draft_to_target: Tensor | None = None) -> Tensor:
    """The target id of the largest logit, the lowest id among equals. scores [..., V] -> int64 [...]."""
    count = scores.shape[-1]
    ids = torch.arange(count, device=scores.device) if draft_to_target is None else draft_to_target.long()
    largest = scores == scores.amax(-1, keepdim=True)
    return torch.where(largest, ids, torch.iinfo(torch.int64).max).amin(-1)
