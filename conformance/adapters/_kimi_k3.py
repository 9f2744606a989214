"""What the adapters of Kimi K3's modelling code share: in which formats it stores, and its names."""

from contextlib import contextmanager

import torch

#: Everything that the modelling code hands on is in the model's type; sums, the router and the norms are in float32.
STORED = ("storage", "logits", "attention_output", "attention_scores", "attention_probabilities", "normalized", "gate")
POLICIES = {
    name: {"accumulate": "float32", "router": "float32", **dict.fromkeys(STORED, name)}
    for name in ("float32", "bfloat16")
}


def by_module(tensors: dict, parts: int = 2) -> dict:
    """Parameters under the last parts of their names: module and weight. Inputs have no dot and are left out."""
    return {".".join(name.split(".")[-parts:]): x for name, x in tensors.items() if "." in name}


@contextmanager
def heads_of(attention):
    """What a ``KimiMLAAttention`` computes while this lasts: ``key`` and ``value``, [B, T, H, .]."""
    projected, seen = {}, {}

    def keep(name):
        return lambda module, args, output: projected.update({name: output})

    hooks = [getattr(attention, name).register_forward_hook(keep(name)) for name in ("kv_a_proj_with_mqa", "kv_b_proj")]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    heads, nope = attention.num_heads, attention.qk_nope_head_dim
    key, value = projected["kv_b_proj"].unflatten(-1, (heads, -1)).split([nope, attention.v_head_dim], -1)
    rope = projected["kv_a_proj_with_mqa"][..., None, attention.kv_lora_rank :].expand(*key.shape[:-1], -1)
    seen.update(key=torch.cat([key, rope], -1), value=value)
