"""Frozen arrays that are trained or changed, trained ones that are not, gradients under a wrong name."""

import numpy as np
import torch

from ...adapters.fast import FastAdapter
from .core import area, around

MUTANTS: list = []
mutant = area("frozen", MUTANTS)
UNCHANGED = "frozen arrays receive no gradient and stay bytewise the same (spec.md 7)"


def answer(method, change):
    """``change(inputs, outputs, grads)`` of what the adapter's method returns; ``change`` works in place."""

    def wrapper(original, self, inputs, **kwargs):
        outputs, grads, *rest = original(self, inputs, **kwargs)
        change(inputs, outputs, grads)
        return outputs, grads, *rest

    return around(FastAdapter, method, wrapper)


def gradient_of(name):
    """``name`` receives a gradient of ones."""
    return answer("unroll", lambda inputs, outputs, grads: grads.update({name: np.ones_like(inputs[name])}))


@mutant(
    "unroll", "frozen", None, UNCHANGED, "F01: speculators #593; Model-Optimizer #907", says="shared_head.head.weight"
)
def frozen_head_is_trained():
    return gradient_of("shared_head.head.weight")


@mutant(
    "unroll", "frozen", None, UNCHANGED, "F02: Model-Optimizer #692; F04: SpecForge #212", says="embed_tokens.weight"
)
def frozen_embedding_is_trained():
    return gradient_of("embed_tokens.weight")


@mutant(
    "unroll", "frozen", None, UNCHANGED, "F10: PaddleFormers #4773; Megatron-LM #7021", says="e_score_correction_bias"
)
def router_bias_is_trained():
    return gradient_of("block_sparse_moe.gate.e_score_correction_bias")


@mutant("unroll", "frozen", None, "the target gets no gradient", "F02: Automodel #2369", says="target_logits")
def target_is_trained():
    return gradient_of("target_logits")


@mutant(
    "unroll", "frozen", None, UNCHANGED, "F01", says="shared_head.norm.weight", choices={"trained": "freeze_head_norm"}
)
def head_norm_trained_though_declared_frozen():
    return gradient_of("shared_head.norm.weight")


@mutant("logits", "backward", None, "head: own is trained", "F04", choices={"head": "own"})
def own_head_not_trained():
    return answer("unroll", lambda inputs, outputs, grads: grads.pop("shared_head.head.weight"))


@mutant("unroll", "frozen", None, UNCHANGED, "F02, F04: weight decay on a frozen array", says="embed_tokens.weight")
def weight_decay_on_the_embedding():
    def decay(inputs, outputs, grads):
        torch.from_numpy(inputs["embed_tokens.weight"]).mul_(0.999)  # what read-only NumPy arrays do not stop

    return answer("unroll", decay)


@mutant("unroll", "frozen", None, UNCHANGED, "F10: PaddleFormers #4773", says="e_score_correction_bias")
def router_bias_updated_in_place():
    def update(inputs, outputs, grads):
        torch.from_numpy(inputs["block_sparse_moe.gate.e_score_correction_bias"]).add_(0.001)

    return answer("unroll", update)


@mutant("unroll", "frozen", None, "inputs are unmodified", "T16: tokenspeed #913; L14: SpecForge #185", says="high")
def features_modified_in_place():
    return answer("unroll", lambda inputs, outputs, grads: torch.from_numpy(inputs["high"]).mul_(0.5))


@mutant("unroll", "frozen", None, "only parameters have gradients", "F08: TorchSpec #184", says="no parameter")
def gradient_under_a_wrong_name():
    return answer("unroll", lambda inputs, outputs, grads: grads.update({"lm_head.weight": grads["fc.weight"]}))


@mutant("fusion", "backward", None, "gradients go by name", "F08: TorchSpec #184")
def gradients_matched_by_position():
    def rotate(inputs, outputs, grads):
        names = [n for n in grads if grads[n].shape == grads["enorm.weight"].shape]
        values = [grads[n] for n in names]
        grads.update(zip(names, values[1:] + values[:1], strict=True))
        grads["fc.weight"] = grads["fc.weight"] * 1.5

    return answer("unroll", rotate)
