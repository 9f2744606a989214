"""Frozen arrays, and the methods beside the unroll: alignment, drafting, speculative sampling."""

import numpy as np
import torch

from draftconf.fast import sampling, unroll

from ...adapters.fast import FastAdapter
from .core import area, around, patch

MUTANTS: list = []
frozen, sampled = area("frozen", MUTANTS), area("sampling", MUTANTS)
drafted, aligned = area("drafting", MUTANTS), area("alignment", MUTANTS)
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


@frozen(
    "unroll", "frozen", None, UNCHANGED, "F01: speculators #593; Model-Optimizer #907", says="shared_head.head.weight"
)
def frozen_head_is_trained():
    return gradient_of("shared_head.head.weight")


@frozen(
    "unroll", "frozen", None, UNCHANGED, "F02: Model-Optimizer #692; F04: SpecForge #212", says="embed_tokens.weight"
)
def frozen_embedding_is_trained():
    return gradient_of("embed_tokens.weight")


@frozen(
    "unroll", "frozen", None, UNCHANGED, "F10: PaddleFormers #4773; Megatron-LM #7021", says="e_score_correction_bias"
)
def router_bias_is_trained():
    return gradient_of("block_sparse_moe.gate.e_score_correction_bias")


@frozen("unroll", "frozen", None, "the target gets no gradient", "F02: Automodel #2369", says="target_logits")
def target_is_trained():
    return gradient_of("target_logits")


@frozen(
    "unroll", "frozen", None, UNCHANGED, "F01", says="shared_head.norm.weight", choices={"trained": "freeze_head_norm"}
)
def head_norm_trained_though_declared_frozen():
    return gradient_of("shared_head.norm.weight")


@frozen("logits", "backward", None, "head: own is trained", "F04", choices={"head": "own"})
def own_head_not_trained():
    return answer("unroll", lambda inputs, outputs, grads: grads.pop("shared_head.head.weight"))


@frozen("unroll", "frozen", None, UNCHANGED, "F02, F04: weight decay on a frozen array", says="embed_tokens.weight")
def weight_decay_on_the_embedding():
    def decay(inputs, outputs, grads):
        torch.from_numpy(inputs["embed_tokens.weight"]).mul_(0.999)  # what read-only NumPy arrays do not stop

    return answer("unroll", decay)


@frozen("unroll", "frozen", None, UNCHANGED, "F10: PaddleFormers #4773", says="e_score_correction_bias")
def router_bias_updated_in_place():
    def update(inputs, outputs, grads):
        torch.from_numpy(inputs["block_sparse_moe.gate.e_score_correction_bias"]).add_(0.001)

    return answer("unroll", update)


@frozen("unroll", "frozen", None, "inputs are unmodified", "T16: tokenspeed #913; L14: SpecForge #185", says="high")
def features_modified_in_place():
    return answer("unroll", lambda inputs, outputs, grads: torch.from_numpy(inputs["high"]).mul_(0.5))


@frozen("unroll", "frozen", None, "only parameters have gradients", "F08: TorchSpec #184", says="no parameter")
def gradient_under_a_wrong_name():
    return answer("unroll", lambda inputs, outputs, grads: grads.update({"lm_head.weight": grads["fc.weight"]}))


@frozen("fusion", "backward", None, "gradients go by name", "F08: TorchSpec #184")
def gradients_matched_by_position():
    def rotate(inputs, outputs, grads):
        names = [n for n in grads if grads[n].shape == grads["enorm.weight"].shape]
        values = [grads[n] for n in names]
        grads.update(zip(names, values[1:] + values[:1], strict=True))
        grads["fc.weight"] = grads["fc.weight"] * 1.5

    return answer("unroll", rotate)


# -- speculative sampling ----------------------------------------------------------------------------------------------

LAW = "accept with min(1, p/q), else draw from max(p-q, 0)/(1-alpha) (spec.md 8)"
SAMPLE = {"methods": ("speculative_sample",)}


def sampler(residual=None, accept=None, propose=None, final=None):
    def wrapper(p, q, draw):
        proposal = sampling.inverse_cdf(q, draw[0]) if propose is None else propose(p, q, draw)
        accepted = draw[1] * q[proposal] < p[proposal] if accept is None else accept(p, q, draw, proposal)
        excess = (p - q).clamp(min=0)
        mass = excess.sum()
        rest = torch.where(mass > 0, excess / torch.where(mass > 0, mass, 1), p) if residual is None else residual(p, q)
        token = sampling.inverse_cdf(rest, draw[2]) if final is None else final(p, q, rest, draw)
        return torch.where(accepted, proposal, token), accepted, rest

    return patch(sampling, "speculative_sample", wrapper)


@sampled("speculative_sample", "forward", None, LAW, "S01: Spec-RL #14", **SAMPLE)
def replacement_drawn_from_the_target():
    return sampler(residual=lambda p, q: p)


@sampled("speculative_sample", "forward", None, LAW, "S01", **SAMPLE)
def residual_not_normalised():
    return sampler(residual=lambda p, q: torch.where((p - q).clamp(min=0).sum() > 0, (p - q).clamp(min=0), p))


@sampled(
    "speculative_sample",
    "forward",
    None,
    "alpha = 1: the residual is p itself",
    "S05: jaymody #5; TorchCode #16",
    **SAMPLE,
)
def residual_of_equal_laws_is_nan():
    return sampler(
        residual=lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(),
        final=lambda p, q, rest, draw: sampling.inverse_cdf(p, draw[2]),
    )


@sampled(
    "speculative_sample",
    "forward",
    None,
    "q is the law the token was drawn from",
    "S02: jaymody #3, #4; EAGLE #221",
    **SAMPLE,
)
def greedy_proposal():
    return sampler(propose=lambda p, q, draw: q.argmax())


@sampled("speculative_sample", "forward", None, LAW, "S04: mlx-swift-lm #459; mlxcel #902", **SAMPLE)
def accepted_when_two_draws_agree():
    return sampler(accept=lambda p, q, draw, x: sampling.inverse_cdf(p, draw[1]) == x)


@sampled("speculative_sample", "forward", None, LAW, "S04", **SAMPLE)
def accepted_with_the_inverse_ratio():
    return sampler(accept=lambda p, q, draw, x: draw[1] * p[x] < q[x])


@sampled(
    "speculative_sample", "forward", None, "three independent draws", "S07: vllm-ascend #13608; vLLM #17498", **SAMPLE
)
def acceptance_reuses_the_proposals_draw():
    return sampler(accept=lambda p, q, draw, x: draw[0] * q[x] < p[x])


@sampled("speculative_sample", "forward", None, "three independent draws", "S07: vllm-ascend #13755", **SAMPLE)
def replacement_reuses_the_acceptances_draw():
    return sampler(final=lambda p, q, rest, draw: sampling.inverse_cdf(rest, draw[1]))


@sampled("speculative_sample", "forward", None, "a token of probability 0 is never drawn", "own", **SAMPLE)
def replacement_of_probability_zero():
    return sampler(final=lambda p, q, rest, draw: (sampling.inverse_cdf(rest, draw[2]) + 1) % len(p))


@sampled("speculative_sample", "forward", None, LAW, "own", **SAMPLE)
def always_accepted():
    return sampler(accept=lambda p, q, draw, x: draw[1] >= 0)


# -- drafting ----------------------------------------------------------------------------------------------------------

SERIAL = "drafting equals the unroll's slot of the anchor (spec.md 8)"
DRAFT = {"methods": ("draft_sequence",), "policy": "float64"}  # in which seven steps can be decided


def cached(change):
    """``change(query, keys, values)`` before the cached attention."""
    return around(unroll, "attention_cached", lambda o, *args: o(*change(*args)))


@drafted("draft_sequence", "forward", None, SERIAL, "A10: tokenspeed #469", **DRAFT)
def cache_misses_the_latest_key():
    return cached(lambda q, k, v: (q, k[:-1], v[:-1]) if len(k) > 1 else (q, k, v))


@drafted("draft_sequence", "forward", None, SERIAL, "T01", **DRAFT)
def cache_forgets_the_first_slot():
    return cached(lambda q, k, v: (q, k[1:], v[1:]) if len(k) > 1 else (q, k, v))


@drafted("draft_sequence", "forward", None, SERIAL, **DRAFT)
def cached_values_in_another_order():
    return cached(lambda q, k, v: (q, k, v.flip(0)))


@drafted("draft_sequence", "forward", None, "the feature recycled is pre-norm", "T19: vLLM #42764", **DRAFT)
def drafting_recycles_the_normed_feature():
    return patch(unroll, "recycle", lambda feature, normed, choices: normed)


@drafted("draft_sequence", "forward", None, "step k is fed given[k-2]", "T07", **DRAFT)
def given_tokens_one_step_late():
    def wrapper(original, params, inputs, *args, **kwargs):
        given = inputs["given"]
        return original(params, inputs | {"given": torch.cat([given[:1], given[:-1]])}, *args, **kwargs)

    return around(unroll, "draft_sequence", wrapper)


@drafted("draft_sequence", "forward", None, "given tokens are used", "own", **DRAFT)
def drafting_feeds_its_own_tokens():
    def wrapper(original, params, inputs, *args, **kwargs):
        return original(params, {n: x for n, x in inputs.items() if n != "given"}, *args, **kwargs)

    return around(unroll, "draft_sequence", wrapper)


@drafted("draft_sequence", "forward", None, "features before the head's norm", "T19", **DRAFT)
def drafting_returns_normed_features():
    def wrapper(original, *args, **kwargs):
        out = original(*args, **kwargs)
        return out | {"features": out["features"] / out["features"].square().mean(-1, keepdim=True).sqrt()}

    return around(unroll, "draft_sequence", wrapper)


# -- alignment ---------------------------------------------------------------------------------------------------------

SLOTS = "slot j: token j+1, feature j, target P_{j+1} (spec.md 3)"
ALIGN = {"methods": ("align",)}


def slots(change):
    """``change(raw, slots)`` of what ``align`` returns, in place."""

    def wrapper(original, raw, *args):
        out = original(raw, *args)
        change(raw, out)
        return out

    return around(unroll, "align", wrapper)


@aligned("align", "forward", None, SLOTS, "T07: SpecForge #885", **ALIGN)
def tokens_not_aligned():
    return slots(lambda raw, out: out.update(tokens=raw["tokens"]))


@aligned("align", "forward", None, SLOTS, "T07: SpecForge #895", **ALIGN)
def targets_not_aligned():
    return slots(lambda raw, out: out.update(target_logits=raw["target_logits"]))


@aligned("align", "forward", None, SLOTS, "T13: vLLM #46788", **ALIGN)
def features_aligned_too():
    return slots(lambda raw, out: out.update(high=torch.cat([raw["high"][1:], 0 * raw["high"][:1]])))


@aligned("align", "forward", None, "mask_alignment: position", "T08: miles #3219", **ALIGN)
def mask_aligned_by_token():
    return around(unroll, "align", lambda o, raw, steps, *_: o(raw, steps, "token"))


@aligned("align", "forward", None, "mask_alignment: slot", "T08", choices={"mask_alignment": "slot"}, **ALIGN)
def mask_aligned_by_position_though_declared_slot():
    return around(unroll, "align", lambda o, raw, steps, *_: o(raw, steps, "position"))


@aligned("align", "forward", None, "position j+k must exist", "T23: Automodel #2464", **ALIGN)
def supervision_wraps_around():
    return around(unroll, "shift", lambda o, x, by, fill: x.roll(-by, 1))


@aligned("align", "forward", None, "position j+k lies in the document of j", "T24: NeMo-RL #3463", **ALIGN)
def alignment_crosses_documents():
    return around(unroll, "align", lambda o, raw, *args: o({n: x for n, x in raw.items() if n != "documents"}, *args))


@aligned("align", "forward", None, "padding is no document", "T38: Automodel #2312", **ALIGN)
def padding_is_supervised():
    return patch(unroll, "inside", lambda documents, k: unroll.shift(documents, k, -9) == documents)


@aligned("align", "forward", None, "supervised has K rows", "own", **ALIGN)
def supervision_of_the_first_step_for_all():
    return slots(lambda raw, out: out.update(supervised=out["supervised"][:1].expand_as(out["supervised"])))
