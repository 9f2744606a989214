"""Alignment of a raw sequence, the K-step unroll, and drafting step after step (spec.md sections 3, 4 and 8)."""

import torch
from torch import Tensor

from .attention import attention_cached, attn_gate, attn_output, mla_keyvalue, mla_latent, mla_query
from .fusion import embed, first_slots, fusion
from .layer import argmax_token, attention_input, draft_layer, feed_forward, head_norm, logits
from .loss import lk_loss, total_loss
from .moe import quantize_experts
from .ops import keep, wide

FLOAT_INPUTS = ("low", "mid", "high", "target_logits")


def align(raw: dict, num_steps: int, mask_alignment: str = "position") -> dict:
    """Slot arrays of one raw sequence: slot j reads token j+1, feature j, target j+1 (spec.md section 3).

    raw: tokens [N], low, mid, high [N, d], target_logits [N, V], mask bool [N], optionally documents int [N].
    Returns the same names (documents all 0 when absent) and supervised bool [K, N]; mask is supervised[0]. Positions
    past the end are filled with token 0 and zero logits.
    """
    tokens, mask = raw["tokens"].unsqueeze(0), raw["mask"].unsqueeze(0)
    documents = raw.get("documents")
    documents = torch.zeros_like(tokens) if documents is None else documents.unsqueeze(0)
    offset = {"slot": -1, "position": 0, "token": 1}[mask_alignment]
    steps = range(1, num_steps + 1)
    supervised = torch.cat([shift(mask, k + offset, False) & inside(documents, k) for k in steps])  # [K, N]
    return {
        "tokens": shift(tokens, 1, 0)[0],
        **{name: raw[name] for name in ("low", "mid", "high")},
        "target_logits": shift(raw["target_logits"].unsqueeze(0), 1, 0)[0],
        "mask": supervised[0],
        "documents": documents[0],
        "supervised": supervised,
    }


def shift(x: Tensor, by: int, fill) -> Tensor:
    """x [B, T, ...] moved ``by`` slots to the left, the right end filled."""
    by = min(by, x.shape[1])
    return torch.cat([x[:, by:], torch.full_like(x[:, :by], fill)], dim=1)


def inside(documents: Tensor, k: int) -> Tensor:
    """Whether position j+k exists and lies in the document of position j. documents int [B, T] -> bool [B, T]."""
    return (shift(documents, k, -1) == documents) & (documents != -1)


def sanitize(inputs: dict) -> dict:
    """The slot arrays with zeros for what padding holds, NaN or not: features of padding slots (document -1), and
    tokens, targets and masks of slots whose next position is not in their document.
    """
    documents = inputs.get("documents")
    if documents is None:
        return inputs
    real, has_next = documents != -1, inside(documents, 1)  # [B, T]
    clean = {name: torch.where(real.unsqueeze(-1), inputs[name], 0) for name in ("low", "mid", "high")}
    clean["target_logits"] = torch.where(has_next.unsqueeze(-1), inputs["target_logits"], 0)
    clean |= {"tokens": torch.where(has_next, inputs["tokens"], 0), "mask": inputs["mask"] & has_next}
    if inputs.get("tokens_by_step") is not None:
        clean["tokens_by_step"] = torch.where(real, inputs["tokens_by_step"], 0)
    return {**inputs, **clean}


def check_inputs(inputs: dict, vocab_size: int) -> None:
    """Raises ValueError, naming array and index, for a token id outside the vocabulary or a non-finite number.

    One pass over each array, whose least or largest is NaN or infinite where an element is; only then is that sought.
    """
    for name in ("tokens", "tokens_by_step", *FLOAT_INPUTS):
        x = inputs.get(name)
        if x is None or not x.numel():
            continue
        (low, high), floats = x.aminmax(), x.is_floating_point()
        if torch.isfinite(low + high) if floats else (low >= 0) & (high < vocab_size):
            continue
        wrong = ~torch.isfinite(x) if floats else (x < 0) | (x >= vocab_size)
        if wrong.any():  # not where low + high alone overflowed
            index = tuple(wrong.nonzero()[0].tolist())
            wanted = "a finite number" if floats else f"an id from 0 to {vocab_size - 1}"
            raise ValueError(f"{name}{list(index)} is {x[index].item()}; wanted {wanted}")


def step_inputs(inputs: dict, k: int, choices) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, T], target logits [B, T, V] and supervised slots bool [B, T] of step k, by shifting those of step 1.

    A slot whose position j+k is past the end or in another document has token 0, zero logits and no supervision.
    """
    tokens, target, mask = inputs["tokens"], inputs["target_logits"], shift(inputs["mask"], k - 1, False)
    documents = inputs.get("documents")
    within = shift(torch.ones_like(mask), k - 1, False) if documents is None else inside(documents, k)
    tokens = inputs["tokens_by_step"][k - 1] if choices.token_source == "given" else shift(tokens, k - 1, 0)
    target = target if choices.target_alignment == "fixed" else shift(target, k - 1, 0)
    return torch.where(within, tokens, 0), torch.where(within.unsqueeze(-1), target, 0), mask & within


def inside_draft_vocabulary(target_logits: Tensor, draft_to_target: Tensor) -> Tensor:
    """Whether the target's arg-max is a token of the draft vocabulary. [B, T, V] -> bool [B, T]."""
    return torch.isin(argmax_token(target_logits), draft_to_target)


def unroll(params: dict, inputs: dict, config, choices, record=keep, forced: dict | None = None, counts=None) -> dict:
    """The loss of the K-step draft step.

    params: tensors under the names of spec.md section 2, in the storage type. inputs, slot-aligned for step 1: tokens
    [B, T], low, mid, high [B, T, d], target_logits [B, T, V], mask bool [B, T]; optionally documents [B, T],
    draft_to_target [v], tokens_by_step [K, B, T]. ``record(name, x)`` sees every stage boundary as "{step}/{stage}".
    ``forced`` may pin "{step}/experts". ``counts`` [K]: see ``total_loss``.
    Returns total_loss [], step_losses [K], slot_losses and supervised [K, B, T].
    """
    inputs = sanitize(inputs)
    check_inputs(inputs, config.vocab_size)
    return unroll_checked(params, inputs, config, choices, record, forced, counts)


def unroll_checked(params: dict, inputs: dict, config, choices, record=keep, forced=None, counts=None) -> dict:
    """The same for inputs that are sanitized and checked: in layout eagle3 nothing here waits for the device."""
    params, forced = widen(params), forced or {}
    quantized = quantize_experts(params, config, choices) if choices.draft_input == "mtp" else None
    documents, draft_to_target = inputs.get("documents"), inputs.get("draft_to_target")
    feature, scores, keys, values, losses, supervised = None, None, [], [], [], []
    for k in range(1, config.num_steps + 1):
        at_step = _prefixed(record, k)
        tokens, target, mask = step_inputs(inputs, k, choices)
        if choices.token_source == "own" and k > 1:
            tokens = forced.get(f"{k}/tokens", argmax_token(scores.detach(), draft_to_target))
            at_step("tokens", tokens)
        zero = first_slots(tokens, documents) if choices.zero_first_embedding and k == 1 else None
        if k == 1:
            fused = fusion(inputs["low"], inputs["mid"], inputs["high"], params, config, choices)
            feature = at_step("fusion", fused)
        feature, key, value = draft_layer(
            feature, tokens, params, config, choices, keys, values, documents, quantized,
            forced.get(f"{k}/experts"), zero, at_step,
        )  # fmt: skip
        keys, values = [*keys, key], [*values, value]
        normed = head_norm(feature, params, config, at_step)
        scores = logits(normed, params, at_step)
        losses.append(at_step("lk_loss", lk_loss(scores, target, draft_to_target, choices.reduced_target)))
        if choices.reduced_supervision == "argmax_inside":
            mask = mask & inside_draft_vocabulary(target, draft_to_target)
        supervised.append(mask)
        feature = recycle(feature, normed, choices)
    slot_losses, supervised = torch.stack(losses), torch.stack(supervised)  # [K, B, T]
    step_weights = choices.weights(config.num_steps)
    total, step_losses = total_loss(slot_losses, supervised, step_weights, choices.reduction, counts)
    return {"total_loss": total, "step_losses": step_losses, "slot_losses": slot_losses, "supervised": supervised}


def recycle(feature: Tensor, normed: Tensor, choices) -> Tensor:
    """The next step's feature: the layer's output before or after the head's norm, perhaps detached."""
    feature = normed if choices.recycled_feature == "post_norm" else feature
    return feature.detach() if choices.detach_between_steps else feature


def widen(params: dict) -> dict:
    """Parameters in the wide type, so that the K steps' gradients are summed wide and rounded once.

    The embedding table stays: it is only looked up.
    """
    return {name: x if name == "embed_tokens.weight" else x.to(wide(x.dtype)) for name, x in params.items()}


def _prefixed(record, step: int):
    return lambda name, x: record(f"{step}/{name}", x)


def draft_sequence(params: dict, inputs: dict, config, choices) -> dict:
    """Draft K tokens one after another after a prefix, with a cache.

    inputs: tokens [T], slot-aligned, and ``feature`` [T, d] (after fusion) or low, mid, high [T, d]; ``given`` [K-1],
    the tokens fed at steps 2..K, the draft's own arg-max when absent; optionally draft_to_target. The anchor is the
    last slot. Returns its logits [K, V or v] and features before the head's norm [K, d].
    """
    params = widen(params)
    quantized = quantize_experts(params, config, choices) if choices.draft_input == "mtp" else None
    feature = inputs.get("feature")
    if feature is None:
        feature = fusion(inputs["low"], inputs["mid"], inputs["high"], params, config, choices)  # [T, d]
    tokens = inputs["tokens"]
    zero = first_slots(tokens.unsqueeze(0))[0] if choices.zero_first_embedding else None
    cached_keys, cached_values, all_logits, features = [], [], [], []
    for k in range(1, config.num_steps + 1):
        embedding = embed(tokens, params["embed_tokens.weight"], zero if k == 1 else None)  # [T, d], then [1, d]
        a, residual = attention_input(embedding, feature, params, config, choices)
        key, value = mla_keyvalue(mla_latent(a, params), params, config, choices)
        cached_keys.append(key)
        cached_values.append(value)
        a, residual = a[-1:], residual[-1:]  # only the anchor's output is needed
        query = mla_query(a, params, config, choices)[0]  # [H, dn+dr]
        output = attention_cached(query, torch.cat(cached_keys), torch.cat(cached_values)).flatten().unsqueeze(0)
        x = attn_output(attn_gate(a, output, params), params, residual)  # [1, d]
        layer_output = feed_forward(x, params, config, choices, quantized)
        normed = head_norm(layer_output, params, config)
        all_logits.append(logits(normed, params)[0])
        features.append(layer_output[0])
        feature = recycle(layer_output, normed, choices)
        if k < config.num_steps:
            given = inputs.get("given")
            own = argmax_token(all_logits[-1], inputs.get("draft_to_target"))
            tokens = (own if given is None else given[k - 1]).reshape(1)
    return {"logits": torch.stack(all_logits), "features": torch.stack(features)}
