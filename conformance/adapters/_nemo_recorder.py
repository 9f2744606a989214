"""What NeMo AutoModel's EAGLE-3 trainer computes on the way, by the suite's stage names: hooks on the modules."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import torch

from ._nemo_parts import core

LAYER = "model.layers.0."
ATTENTION = LAYER + "self_attn."

#: The stage that a module of the draft puts out, and the stage that a module takes in.
OUTPUTS = {
    "model.fc": "fusion",
    "model.embed_tokens": "embed",
    LAYER + "input_layernorm": "draft_input.enorm",
    LAYER + "hidden_norm": "draft_input.hnorm",
    ATTENTION + "q_a_proj": "mla_query.low",
    ATTENTION + "q_a_layernorm": "mla_query.norm",
    ATTENTION + "kv_a_proj_with_mqa": "mla_latent",
    ATTENTION + "kv_a_layernorm": "mla_keyvalue.norm",
    ATTENTION + "g_proj": "attn_gate.pre",
    LAYER + "post_attention_layernorm": "moe_norm",
    LAYER + "mlp.gate_proj": "dense_mlp.gate",
    LAYER + "mlp.up_proj": "dense_mlp.up",
    LAYER + "mlp": "dense_mlp",
    LAYER.rstrip("."): "layer_output",
    "model.norm": "head_norm",
    "lm_head": "logits",
}
INPUTS = {
    ATTENTION.rstrip("."): "draft_input",
    ATTENTION + "o_proj": "attn_gate",
    LAYER + "post_attention_layernorm": "attn_output",
    LAYER + "mlp.down_proj": "dense_mlp.hidden",
}


class Recorder:
    """Stage boundaries of every step: tensors on the autograd path, and how they make up the suite's array."""

    def __init__(self):
        self.step, self.kept, self.below, self.step_losses = 0, {}, {}, []

    def keep(self, stage: str, *tensors, layout=np.asarray) -> None:
        for tensor in tensors:
            tensor.requires_grad_().retain_grad()
        self.kept[f"{max(self.step, 1)}/{stage}"] = tensors, layout

    def attach(self, draft) -> None:
        draft.register_forward_pre_hook(self._next_step)
        for name, stage in OUTPUTS.items():
            draft.get_submodule(name).register_forward_hook(
                lambda _, args, output, stage=stage: self.keep(stage, output)
            )
        for name, stage in INPUTS.items():
            draft.get_submodule(name).register_forward_pre_hook(lambda _, args, stage=stage: self.keep(stage, args[0]))
        attention = draft.get_submodule(ATTENTION.rstrip("."))
        attention.register_forward_hook(self._keep_key_value)
        attention.q_b_proj.register_forward_hook(partial(self._keep_query, heads=attention.num_heads))
        attention._eager_attention_forward = partial(self._keep_attention, attention._eager_attention_forward)

    def _next_step(self, draft, args) -> None:
        self.step += 1

    def _keep_query(self, _, args, output, heads) -> None:
        self.keep("mla_query", output, layout=lambda q: q.reshape(*q.shape[:2], heads, -1))

    def _keep_key_value(self, _, args, output) -> None:
        keys, values = args[3]  # the cache: lists of [B,H,T,.], one entry a step
        self.keep("mla_keyvalue", keys[-1], values[-1], layout=lambda k, v: np.concatenate([k, v], -1).swapaxes(1, 2))

    def _keep_attention(self, attend, *args):
        """Stands in for a method that no module hook reaches."""
        output = attend(*args)
        self.keep("attention", output)
        return output

    @contextmanager
    def listening(self):
        """Also keep each slot's loss and the comparison of q with p, which are no module's output."""
        masked_mean, minimum = core._masked_mean, torch.minimum

        def keep_loss(log_acceptance, position_mask):
            self.keep("lk_loss", log_acceptance, layout=np.negative)
            mean = masked_mean(log_acceptance, position_mask)
            self.step_losses.append(-array(mean))
            return mean

        def keep_below(p, q):
            self.below[f"{max(self.step, 1)}/below"] = (q < p).numpy()
            return minimum(p, q)

        with mock.patch.object(core, "_masked_mean", keep_loss), mock.patch.object(torch, "minimum", keep_below):
            yield

    def values(self) -> dict:
        return {key: layout(*map(array, tensors)) for key, (tensors, layout) in self.kept.items()}

    def cotangents(self) -> dict:
        return {f"{key}.grad": layout(*map(gradient, tensors)) for key, (tensors, layout) in self.kept.items()}


def array(tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


def gradient(tensor) -> np.ndarray:
    return array(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
