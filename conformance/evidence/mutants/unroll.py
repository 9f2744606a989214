"""Wrong unrolls: what step k reads, which slots count, how the losses are summed, what flows between the steps."""

import torch

from draftconf.fast import attention, fusion, layer, moe, unroll
from draftconf.fast.unroll import shift
from draftconf.reference.config import expert_of

from .core import STEPS, area, around, backward, both, patch, with_gradient_of

MUTANTS: list = []
mutant = area("unroll", MUTANTS)
SHIFTED = "slot j of step k reads position j+k (spec.md 3)"
MEAN = "a step's loss is the mean over its supervised slots (spec.md 5)"
WEIGHTS = "total = sum of step weight times step loss (spec.md 5, 9)"
FLOWS = "gradients flow through all steps (spec.md 4)"


def read(change):
    """``change(tokens, target, mask, inputs, k)`` of what step k reads."""
    return around(unroll, "step_inputs", lambda o, inputs, k, choices: change(*o(inputs, k, choices), inputs, k))


def summed(change):
    """``change(slot_losses, supervised, weights)`` -> step losses, then weighted as usual."""

    def wrapper(original, losses, supervised, weights, *_):
        steps = change(losses, supervised, weights)
        return (steps * steps.new_tensor(weights)).sum(), steps

    return around(unroll, "total_loss", wrapper)


def mean(losses, supervised, dims=(1, 2)):
    return torch.where(supervised, losses, 0).sum(dims) / supervised.sum(dims).clamp(min=1)


# -- what a step reads -------------------------------------------------------------------------------------------------


@mutant("embed", "forward", 2, SHIFTED, "T07: SpecForge #885")
def tokens_not_shifted():
    return read(lambda tokens, target, mask, inputs, k: (inputs["tokens"], target, mask))


@mutant("embed", "forward", 1, SHIFTED, "T08: Megatron-LM #5011")
def tokens_shifted_once_more():
    return read(lambda tokens, target, mask, inputs, k: (shift(tokens, 1, 0), target, mask))


@mutant(
    "embed",
    "forward",
    1,
    "a position past the end reads token 0, any other its own (spec.md 3)",
    "T23: Automodel #2464",
)
def first_slot_reads_the_last_token():
    def change(tokens, target, mask, inputs, k):
        return torch.cat([tokens[:, -1:], tokens[:, 1:]], 1), target, mask

    return read(change)


@mutant(
    "lk_loss", "forward", 2, "the target of slot j at step k is P_{j+k} (O target_alignment)", "T07: SpecForge #895"
)
def target_not_shifted():
    return read(lambda tokens, target, mask, inputs, k: (tokens, inputs["target_logits"], mask))


@mutant("lk_loss", "forward", 1, "the target of slot j at step k is P_{j+k}")
def target_shifted_once_more():
    return read(lambda tokens, target, mask, inputs, k: (tokens, shift(target, 1, 0), mask))


@mutant("lk_loss", "forward", 2, "declared target_alignment: fixed", choices={"target_alignment": "fixed"})
def target_shifted_though_declared_fixed():
    return read(lambda t, target, mask, inputs, k: (t, shift(inputs["target_logits"], k - 1, 0), mask))


@mutant("lk_loss", "forward", 2, "the mask moves with the slot: m_{j+k}", "T07: SpecForge #885, #895")
def mask_not_shifted():
    return read(lambda tokens, target, mask, inputs, k: (tokens, target, inputs["mask"]))


@mutant(
    "lk_loss", "forward", 1, "only the unroll shifts the mask", "T08: radixark/miles #3219, #3233; Megatron-LM #5011"
)
def mask_shifted_twice():
    return read(lambda tokens, target, mask, inputs, k: (tokens, target, shift(mask, 1, False)))


@mutant("lk_loss", "forward", 1, "mask_alignment: position", "SpecForge, EAGLE read it as slot")
def mask_one_slot_late():
    return read(lambda tokens, target, mask, *_: (tokens, target, torch.cat([mask[:, :1], mask[:, :-1]], 1)))


@mutant("lk_loss", "forward", 1, "a slot with a false mask has no loss", "T08: speculators")
def mask_ignored():
    return read(lambda tokens, target, mask, inputs, k: (tokens, target, torch.ones_like(mask)))


@mutant("lk_loss", "forward", 1, "positions past the end are never supervised", "T23: Automodel #2464")
def shifts_wrap_around():
    return around(unroll, "shift", lambda o, x, by, fill: x.roll(-by, 1))


@mutant("lk_loss", "forward", 1, "position j+k must lie in the document of j", "T24: NeMo-RL #3463; Automodel #3002")
def supervision_crosses_documents():
    def inside(documents, k):
        exists = shift(torch.ones_like(documents, dtype=torch.bool), k, False)
        return exists & (documents != -1) & (shift(documents, k, -1) != -1)

    return patch(unroll, "inside", inside)


@mutant("lk_loss", "forward", 1, "a document's tail is not supervised", "T10: PaddleFleet #1808")
def filler_is_trained():
    def sanitize(original, inputs):
        return {**original(inputs), "mask": inputs["mask"] & (inputs["documents"] != -1)}

    def tails(tokens, target, mask, inputs, k):
        return tokens, target, shift(inputs["mask"], k - 1, False)

    return both(around(unroll, "sanitize", sanitize), read(tails))


@mutant("lk_loss", "forward", 1, "padding is never supervised", "T38: Automodel #2312")
def mask_made_for_right_padding():
    def sanitize(original, inputs):
        lengths = (inputs["documents"] != -1).sum(1, keepdim=True)
        first = torch.arange(inputs["mask"].shape[1]) < lengths - 1  # the first slots, wherever the padding is
        return original(inputs) | {"mask": original(inputs)["mask"] & first}

    return around(unroll, "sanitize", sanitize)


@mutant("embed", "forward", 1, "no position is special (O zero_first_embedding)", "T22: vLLM #14647, #33299")
def first_embedding_zeroed():
    def wrapper(original, tokens, table, zero=None):
        return original(tokens, table, fusion.first_slots(tokens))

    return around(layer, "embed", wrapper)


@mutant(
    "embed",
    "forward",
    1,
    "zero_first_embedding: the first slot of each document",
    "T24: vLLM #49938",
    choices={"zero_first_embedding": True},
)
def only_the_rows_first_embedding_zeroed():
    return around(unroll, "first_slots", lambda o, tokens, documents=None: o(tokens))


@mutant("embed", "forward", 2, "zero_first_embedding holds at step 1 only", choices={"zero_first_embedding": True})
def first_embedding_zeroed_at_every_step():
    def wrapper(original, feature, tokens, *args):
        *rest, _, record = args
        documents = rest[5]
        return original(feature, tokens, *rest, fusion.first_slots(tokens, documents), record)

    return around(unroll, "draft_layer", wrapper)


@mutant(
    "embed",
    "decision",
    2,
    "own tokens are target ids",
    "T28: SpecForge #492",
    choices={"head": "reduced", "token_source": "own"},
)
def own_tokens_in_draft_ids():
    return around(unroll, "argmax_token", lambda o, scores, ids=None: o(scores))


@mutant("embed", "decision", 2, "own tokens are the arg-max of the slot's own logits", choices={"token_source": "own"})
def own_tokens_are_second_best():
    return patch(unroll, "argmax_token", lambda scores, ids=None: scores.topk(2, -1).indices[..., 1])


@mutant("embed", "forward", 3, "token_source: given", choices={"token_source": "given"})
def given_tokens_of_step_two_reused():
    def change(tokens, target, mask, inputs, k):
        return torch.where(tokens >= 0, inputs["tokens_by_step"][min(k, 2) - 1], 0), target, mask

    return read(change)


# -- what flows from step to step --------------------------------------------------------------------------------------


@mutant("draft_input", "forward", 2, "the next step's feature is the draft's own output", "T19")
def feature_never_recycled():
    first = []

    def wrapper(original, feature, *args):
        first[:] = first if args[4] else [feature]  # keys of earlier steps: empty at step 1
        return original(first[0], *args)

    return around(unroll, "draft_layer", wrapper)


@mutant(
    "draft_input",
    "forward",
    2,
    "recycled before the head's norm (O recycled_feature)",
    "T19: SpecForge #879; EAGLE #233",
)
def normed_feature_recycled():
    return patch(unroll, "recycle", lambda feature, normed, choices: normed)


@mutant(
    "draft_input",
    "forward",
    2,
    "recycled_feature: post_norm",
    "T19: vLLM #42764",
    choices={"recycled_feature": "post_norm"},
)
def raw_feature_recycled_though_declared_post_norm():
    return patch(unroll, "recycle", lambda feature, normed, choices: feature)


@mutant("draft_input", "forward", 2, "slot j recycles its own output")
def feature_recycled_from_the_slot_before():
    return around(unroll, "recycle", lambda o, f, n, c: torch.cat([o(f, n, c)[:, :1], o(f, n, c)[:, :-1]], 1))


@mutant("draft_input", "graph", STEPS, FLOWS, "XTuner #2048 (T40)")
def recycled_feature_detached():
    return around(unroll, "recycle", lambda o, *args: o(*args).detach())


@mutant("draft_input", "graph", STEPS, FLOWS, layout="eagle3")
def recycled_feature_detached_in_eagle3():
    def wrapper(original, embedding, feature, *args):
        x, _ = original(embedding, feature.detach(), *args)
        return x, feature

    return around(layer, "attention_input", wrapper)


@mutant("draft_input", "graph", STEPS, "detach_between_steps: true", choices={"detach_between_steps": True})
def attached_though_declared_detached():
    return patch(unroll, "recycle", lambda feature, normed, choices: feature)


@mutant("draft_input", "graph", 2, FLOWS)
def recycled_feature_detached_once():
    def wrapper(original, feature, *args):
        return original(feature.detach() if len(args[4]) == 1 else feature, *args)

    return around(unroll, "draft_layer", wrapper)


def earlier(change):
    """``change(keys)`` of the earlier steps' keys, and the same of their values."""

    def wrapper(original, feature, tokens, params, config, choices, keys, values, *rest):
        return original(feature, tokens, params, config, choices, change(keys), change(values), *rest)

    return around(unroll, "draft_layer", wrapper)


@mutant("attention", "graph", STEPS, "gradients reach earlier keys and values too", "own; T40")
def earlier_keys_detached():
    return earlier(lambda xs: [x.detach() for x in xs])


@mutant("attention", "graph", STEPS, "the step-1 keys feed every later step")
def step_one_keys_detached():
    return earlier(lambda xs: [x.detach() if i == 0 else x for i, x in enumerate(xs)])


@mutant("attention", "graph", STEPS, "values get a gradient from every later step")
def earlier_values_detached():
    def wrapper(original, feature, tokens, params, config, choices, keys, values, *rest):
        return original(feature, tokens, params, config, choices, keys, [v.detach() for v in values], *rest)

    return around(unroll, "draft_layer", wrapper)


@mutant("draft_input", "graph", STEPS, "the gradient is summed over all K steps: truncated after one", "own")
def gradient_truncated_to_one_step():
    return both(
        around(unroll, "recycle", lambda o, *args: o(*args).detach()), earlier(lambda xs: [x.detach() for x in xs])
    )


@mutant("lk_loss", "graph", STEPS, "K = 7 steps (report 4.1.4)")
def one_step_too_few():
    def wrapper(original, params, inputs, config, *args, **kwargs):
        from dataclasses import replace

        return original(params, inputs, replace(config, num_steps=STEPS - 1), *args, **kwargs)

    return around(unroll, "unroll", wrapper)


@mutant("fusion", "backward", 1, "a weight's gradient is summed over the steps", "T40: xtuner #2048")
def every_gradient_is_absent():
    from ...adapters.fast import FastAdapter

    def wrapper(original, self, inputs, **kwargs):
        outputs, grads, *rest = original(self, inputs, **kwargs)
        return outputs, dict.fromkeys(grads), *rest

    return around(FastAdapter, "unroll", wrapper)


def weight_gradients(*names, when):
    """The named weights are detached at the steps where ``when(step)``."""

    def wrapper(original, feature, tokens, params, config, choices, keys, *rest):
        if when(len(keys) + 1):
            params = {n: x.detach() if n in names else x for n, x in params.items()}
        return original(feature, tokens, params, config, choices, keys, *rest)

    return around(unroll, "draft_layer", wrapper)


@mutant("attn_output", "graph", STEPS - 1, "a weight's gradient is summed over the steps")
def weight_gradient_of_the_last_step_only():
    return weight_gradients("self_attn.o_proj.weight", when=lambda k: k < STEPS)


@mutant("moe_norm", "graph", 1, "a weight's gradient is summed over the steps")
def weight_gradient_misses_the_first_step():
    return weight_gradients("post_attention_layernorm.weight", when=lambda k: k == 1)


@mutant("shared_experts", "graph", 4, "a weight's gradient is summed over the steps")
def weight_gradient_misses_step_four():
    return weight_gradients("block_sparse_moe.shared_experts.down_proj.weight", when=lambda k: k == 4)


@mutant("expert_hidden", "graph", 3, "an expert's gradient is summed over the steps", "E25: Automodel #3140")
def expert_gradient_misses_step_three():
    def wrapper(original, *args):
        args = list(args)
        if len(args[5]) == 2:  # quantised experts come after keys, values and documents
            args[8] = args[8] | {"w1": tuple(w.detach() for w in args[8]["w1"])}
        return original(*args)

    return around(unroll, "draft_layer", wrapper)


def doubled(name):
    """The gradient of one parameter counted twice."""

    def widen(original, params):
        return {n: backward(x, lambda d: 2 * d) if n == name else x for n, x in original(params).items()}

    return around(unroll, "widen", widen)


@mutant(
    "router_scores",
    "backward",
    None,
    "side effects and gradients once per token",
    "E25: Automodel #3247, LoongForge #215",
)
def router_gradient_counted_twice():
    return doubled("block_sparse_moe.gate.weight")


@mutant("fusion", "backward", None, "gradients are not reduced twice", "T37: SpecForge 02bf0a7d; speculators #759")
def fusion_gradient_reduced_twice():
    return doubled("fc.weight")


# -- losses of slots, steps and the total ------------------------------------------------------------------------------


@mutant("lk_loss", "forward", 1, MEAN, "T11: EAGLE #340; SpecForge #705")
def mean_over_all_slots():
    return around(unroll, "total_loss", lambda o, l, s, w, *_: o(l, s, w, "all_slots"))


@mutant("lk_loss", "forward", 1, "reduction: all_slots", choices={"reduction": "all_slots"})
def mean_over_supervised_though_declared_all_slots():
    return around(unroll, "total_loss", lambda o, l, s, w, *_: o(l, s, w, "supervised"))


@mutant("lk_loss", "forward", 1, "split batches use the whole batch's counts", "T35: mlx-lm #1413; transformers #34191")
def mean_of_row_means():
    return summed(lambda losses, supervised, w: mean(losses, supervised, (2,)).mean(1))


@mutant("lk_loss", "forward", 2, MEAN, "T34: speculators #798")
def count_of_step_one_for_all():
    return around(unroll, "total_loss", lambda o, l, s, w, *_: o(l, s, w, "supervised", s[0].sum().expand(len(l))))


@mutant("lk_loss", "forward", 1, MEAN, "L11: easydistill #16")
def divided_by_the_count_twice():
    return summed(lambda losses, supervised, w: mean(losses, supervised) / supervised.sum((1, 2)).clamp(min=1))


@mutant("lk_loss", "forward", 1, "mean of -log alpha, not -log of the mean", "L01: SpecForge 4e9b1e4a")
def log_of_the_mean_overlap():
    def change(losses, supervised, w):
        alpha = torch.where(supervised, torch.exp(-losses.clamp(max=80)), 0).sum((1, 2))
        return -(alpha / supervised.sum((1, 2)).clamp(min=1)).clamp(min=1e-30).log() * supervised.any(2).any(1)

    return summed(change)


@mutant("lk_loss", "forward", 5, "a step without supervised slots contributes exactly 0", "T34: Automodel #2259")
def empty_step_is_nan():
    return summed(lambda l, s, w: torch.where(s, l, 0).sum((1, 2)) / s.sum((1, 2)))


@mutant("total_loss", "forward", None, "a step without supervised slots keeps its weight", "T34: speculators #798")
def weights_normalised_over_supervised_steps():
    def wrapper(original, l, s, w, *rest):
        _, steps = original(l, s, w, *rest)
        w = steps.new_tensor(w) * s.any(2).any(1)
        return (steps * w / w.sum()).sum(), steps

    return around(unroll, "total_loss", wrapper)


def weighted(change):
    return around(unroll, "total_loss", lambda o, l, s, w, *rest: o(l, s, change(w), *rest))


@mutant("total_loss", "forward", None, WEIGHTS, "T34: Automodel #2908")
def decayed_step_weights():
    return weighted(lambda w: [0.8**k for k in range(len(w))])


@mutant(
    "total_loss",
    "forward",
    None,
    "step_weights: decay starts at 1",
    "T34: Automodel #2259",
    choices={"step_weights": "decay"},
)
def decay_starts_one_step_late():
    return weighted(lambda w: [0.8 ** (k + 1) for k in range(len(w))])


@mutant(
    "total_loss",
    "forward",
    None,
    "step_weights: decay_normalized has sum 1",
    "T34: speculators #798",
    choices={"step_weights": "decay_normalized"},
)
def decay_not_normalised():
    return weighted(lambda w: [0.8**k for k in range(len(w))])


@mutant("total_loss", "forward", None, WEIGHTS, "T34: Automodel #2908")
def first_step_has_no_weight():
    return weighted(lambda w: [0, *w[1:]])


@mutant("total_loss", "forward", None, WEIGHTS, "T34")
def summed_instead_of_averaged():
    return weighted(lambda w: [1.0] * len(w))


@mutant("lk_loss", "backward", 1, WEIGHTS, "T37: SpecForge ea5a5f59")
def gradient_scaled_by_world_size():
    def wrapper(original, *args):
        total, steps = original(*args)
        return backward(total, lambda d: d / 2), steps

    return around(unroll, "total_loss", wrapper)


@mutant("lk_loss", "backward", 1, "every step's loss has a gradient")
def only_the_last_step_is_trained():
    def wrapper(original, l, *args):
        return original(torch.cat([l[:-1].detach(), l[-1:]]), *args)

    return around(unroll, "total_loss", wrapper)


@mutant("lk_loss", "backward", 1, "unsupervised slots have no gradient", "L13")
def gradient_reaches_masked_slots():
    def wrapper(original, l, s, *args):
        total, steps = original(l, s, *args)
        everywhere, _ = original(l, torch.ones_like(s), *args)
        return with_gradient_of(total, everywhere), steps

    return around(unroll, "total_loss", wrapper)


@mutant(
    "unroll",
    "forward",
    None,
    "padding's contents, NaN included, change nothing",
    "T02: SpecForge #245; L13: pytorch #152088",
)
def padding_multiplied_away():
    def total(original, l, s, *args):
        return original(l * s, torch.ones_like(s), args[0], "supervised", s.sum((1, 2)))

    def sanitize(original, inputs):
        return original(inputs) | {"target_logits": inputs["target_logits"]}

    unchecked = patch(unroll, "check_inputs", lambda *args: None)
    unfilled = read(lambda tokens, target, mask, inputs, k: (tokens, shift(inputs["target_logits"], k - 1, 0), mask))
    return both(around(unroll, "total_loss", total), around(unroll, "sanitize", sanitize), unchecked, unfilled)


@mutant("attention", "forward", 1, "a padding slot's contents change no other slot", "T02: SpecForge #245 (7286dc54)")
def padding_is_read():
    def visible(original, num_slots, documents, device):
        causal = torch.ones(num_slots, num_slots, dtype=torch.bool).tril()
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        return (causal & (same | (documents == -1).unsqueeze(-2))) | torch.eye(num_slots, dtype=torch.bool)

    return around(attention, "visible", visible)


# -- the reduced vocabulary --------------------------------------------------------------------------------------------

REDUCED = {"head": "reduced"}


@mutant("lk_loss", "forward", 1, "draft_to_target holds absolute target ids", "T25: verl-SpeCo #67", choices=REDUCED)
def map_used_as_offset():
    def wrapper(original, draft, target, ids, reduced):
        offset = (ids + torch.arange(len(ids))).clamp(max=target.shape[-1] - 1)
        return original(draft, target, offset, reduced)

    return around(unroll, "lk_loss", wrapper)


@mutant("lk_loss", "forward", 1, "the map is mandatory", "T26: verl-SpeCo #66; Automodel #2447", choices=REDUCED)
def first_ids_in_place_of_the_map():
    return around(
        unroll, "lk_loss", lambda o, draft, target, ids, reduced: o(draft, target, torch.arange(len(ids)), reduced)
    )


@mutant(
    "lk_loss",
    "forward",
    1,
    "restricted: p keeps its full normaliser",
    "L08: SpecForge #492 (057884fd)",
    choices=REDUCED,
)
def target_renormalised():
    return around(unroll, "lk_loss", lambda o, draft, target, ids, reduced: o(draft, target, ids, "renormalized"))


@mutant(
    "lk_loss",
    "forward",
    1,
    "argmax_inside compares target ids",
    "T28: SpecForge #492 (c90d72a0)",
    choices={"head": "reduced", "reduced_supervision": "argmax_inside"},
)
def argmax_compared_in_draft_ids():
    return around(unroll, "inside_draft_vocabulary", lambda o, target, ids: o(target, torch.arange(len(ids))))


@mutant(
    "lk_loss",
    "forward",
    1,
    "argmax_inside is part of the mask",
    "T28: TorchSpec #186",
    choices={"head": "reduced", "reduced_supervision": "argmax_inside"},
)
def argmax_outside_still_counted():
    return patch(
        unroll, "inside_draft_vocabulary", lambda target, ids: torch.ones_like(target[..., 0], dtype=torch.bool)
    )


# -- fusion ------------------------------------------------------------------------------------------------------------

TAPS = "f = fc [low; mid; high] (report 4.1.4)"


def taps(change):
    return around(unroll, "fusion", lambda o, low, mid, high, *args: o(*change(low, mid, high), *args))


@mutant("fusion", "forward", 1, TAPS, "T13: sglang #25454; TorchSpec #87")
def features_in_another_order():
    return taps(lambda low, mid, high: (mid, low, high))


@mutant("fusion", "forward", 1, TAPS, "T16: tokenspeed #913")
def low_is_a_view_of_mid():
    return taps(lambda low, mid, high: (mid, mid, high))


@mutant("fusion", "forward", 1, TAPS, "T17: tokenspeed #958")
def high_misses_its_prefix():
    return taps(lambda low, mid, high: (low, mid, high - mid))


@mutant("fusion", "forward", 1, "features are those of the slot's own position", "T13: vLLM #46788")
def features_one_position_late():
    return taps(lambda *parts: tuple(torch.cat([x[:, :1], x[:, :-1]], 1) for x in parts))


@mutant("fusion", "forward", 1, TAPS, "own; report: W_E3 starts as [0 0 I]")
def only_the_high_feature():
    return taps(lambda low, mid, high: (0 * low, 0 * mid, high))


@mutant("fusion", "forward", 1, "feature_norm: none", "T20: speculators #610, #670")
def features_normed_unasked():
    def wrapper(original, *parts_and_rest):
        parts, rest = parts_and_rest[:3], parts_and_rest[3:]
        return original(*(fusion.rms_norm(x, torch.ones_like(x[0, 0]), 1e-5) for x in parts), *rest)

    return around(unroll, "fusion", wrapper)


@mutant("fusion", "forward", 1, "feature_norm: per_chunk", "T20: sglang #32334", choices={"feature_norm": "per_chunk"})
def joint_norm_though_declared_per_chunk():
    def wrapper(original, low, mid, high, params, config, choices):
        joined = torch.cat([low, mid, high], -1)
        gain = torch.cat([params[f"fc_norm.{i}.weight"] for i in range(3)])
        return fusion.linear(fusion.rms_norm(joined, gain, config.rms_norm_eps), params["fc.weight"])

    return around(unroll, "fusion", wrapper)


@mutant("fusion", "backward", 1, "fc is trained")
def fusion_weight_detached():
    def wrapper(original, low, mid, high, params, *args):
        return original(low, mid, high, params | {"fc.weight": backward(params["fc.weight"], lambda d: 0 * d)}, *args)

    return around(unroll, "fusion", wrapper)


@mutant("expert_hidden", "graph", None, "an expert without tokens has an exact zero gradient", "E19: Automodel #532")
def idle_expert_has_no_gradient():
    from ...adapters.fast import FastAdapter

    def wrapper(original, self, inputs, **kwargs):
        outputs, grads, *rest = original(self, inputs, **kwargs)
        return outputs, {n: d if not expert_of(n) or d.any() else None for n, d in grads.items()}, *rest

    return around(FastAdapter, "unroll", wrapper)


@mutant("expert_hidden", "backward", None, "an expert without tokens has an exact zero gradient", "E19: sglang #40187")
def idle_expert_gradient_uninitialised():
    from ...adapters.fast import FastAdapter

    def wrapper(original, self, inputs, **kwargs):
        outputs, grads, *rest = original(self, inputs, **kwargs)
        stale = {n: d + 1e-3 for n, d in grads.items() if expert_of(n) and not d.any()}
        return outputs, grads | stale, *rest

    return around(FastAdapter, "unroll", wrapper)


@mutant("expert_hidden", "forward", 1, "expert 0 is an expert", "sglang #33541")
def expert_zero_taken_for_missing():
    def wrapper(original, x, weights, groups, dtype):
        return original(x, (weights[0] * 0, *weights[1:]), groups, dtype)

    return around(moe, "expert_linear", wrapper)
