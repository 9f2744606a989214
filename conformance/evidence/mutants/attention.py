"""Wrong draft layers up to the attention's residual: norms, projections, visible keys, softmax, output gate."""

import torch

from draftconf.fast import attention, fusion, layer, ops, unroll

from .core import STEPS, area, around, backward, during, norm_with, patch, with_gradient_of

MUTANTS: list = []
mutant = area("attention", MUTANTS)
VISIBLE = "the step-1 keys of slots i <= j of the document, and the slot's own key of each later step"
SCALE = "scale (dn+dr)^(-1/2)"
NORM = "w x / sqrt(mean(x^2) + eps), eps 1e-5"


# -- the draft layer's input -------------------------------------------------------------------------------------------


@mutant(
    "draft_input", "forward", 1, "eh_proj [RMSNorm(e); RMSNorm(f)], embedding first", "loaders of MTP layers differ"
)
def embedding_and_feature_swapped():
    return around(layer, "draft_input", lambda o, e, f, *args: o(f, e, *args))


@mutant("draft_input", "forward", 1, "columns 0..d of eh_proj are the embedding's")
def halves_of_eh_proj_swapped():
    def wrapper(original, e, f, params, *args):
        halves = params["eh_proj.weight"].chunk(2, -1)
        return original(e, f, params | {"eh_proj.weight": torch.cat(halves[::-1], -1)}, *args)

    return around(layer, "draft_input", wrapper)


@mutant("draft_input", "forward", 1, "enorm belongs to the embedding, hnorm to the feature")
def input_norms_swapped():
    def wrapper(original, e, f, params, *args):
        return original(
            e, f, params | {"enorm.weight": params["hnorm.weight"], "hnorm.weight": params["enorm.weight"]}, *args
        )

    return around(layer, "draft_input", wrapper)


@mutant("draft_input", "forward", 1, "in eagle3 the join is [norm e; norm f]", "AutoModel's K3 draft", layout="eagle3")
def join_swapped_in_eagle3():
    def wrapper(original, e, f, params, config, choices, record):
        seen = {}
        x = original(
            e, f, params, config, choices, lambda name, y: seen.setdefault(name, record(name, y) if "." in name else y)
        )
        return record("draft_input", torch.cat(x.chunk(2, -1)[::-1], -1))

    return around(layer, "draft_input", wrapper)


@mutant("embed", "forward", 1, "e = embed_tokens[x]", "Gemma scales by sqrt(d)")
def embedding_scaled():
    return around(layer, "embed", lambda o, tokens, table, *args: o(tokens, table * table.shape[-1] ** 0.5, *args))


@mutant("embed", "forward", 1, "e = embed_tokens[x]", "TorchSpec #184 (F08)")
def embedding_rows_permuted():
    return around(layer, "embed", lambda o, tokens, table, *args: o(tokens, table.roll(1, 0), *args))


@mutant("draft_input", "backward", None, "enorm is trained")
def embedding_norm_frozen():
    def wrapper(original, e, f, params, *args):
        return original(e, f, params | {"enorm.weight": backward(params["enorm.weight"], lambda d: 0 * d)}, *args)

    return around(layer, "draft_input", wrapper)


# -- norms -------------------------------------------------------------------------------------------------------------


def norm_of(module, **wrong):
    return around(module, "rms_norm", norm_with(**wrong))


@mutant("draft_input", "forward", 1, NORM, "A05: transformers #44261")
def input_epsilon_1e_6():
    return norm_of(fusion, eps_change=lambda eps: 1e-6)


@mutant("draft_input", "forward", 1, NORM)
def input_epsilon_outside_the_root():
    return norm_of(fusion, outside=True)


@mutant("draft_input", "forward", 1, NORM)
def input_mean_over_one_less():
    return norm_of(fusion, denominator=lambda d: d - 1)


@mutant("draft_input", "forward", 1, NORM)
def input_norm_centered():
    return norm_of(fusion, center=True)


@mutant("draft_input", "forward", 1, NORM, "Gemma multiplies by 1 + w")
def input_gain_plus_one():
    return norm_of(fusion, gain=lambda w: 1 + w)


@mutant("attn_norm", "forward", 1, NORM)
def attention_norm_epsilon_1e_6():
    return during(layer, "attention_input", lambda: norm_of(layer, eps_change=lambda eps: 1e-6))


@mutant("attn_norm", "forward", 1, "a = RMSNorm(x0; input_layernorm)", "AutoModel's K3 draft has no input_layernorm")
def attention_norm_left_out():
    def wrapper(original, embedding, feature, params, config, choices, record):
        _, residual = original(
            embedding, feature, params, config, choices, lambda n, x: x if n == "attn_norm" else record(n, x)
        )
        return record("attn_norm", with_gradient_of(residual, residual)), residual

    return around(layer, "attention_input", wrapper)


@mutant("attn_norm", "forward", 1, NORM)
def attention_norm_over_half_the_features():
    def half(original, x, weight, eps):
        root = torch.sqrt(x[..., ::2].square().mean(-1, keepdim=True) + eps)
        return weight * (x / root)

    return during(layer, "attention_input", lambda: around(layer, "rms_norm", half))


@mutant("mla_query", "forward", 1, "latent_norm_eps 1e-5", "A05: transformers #44261, #48762; Megatron-LM #6122")
def query_latent_epsilon_1e_6():
    return during(attention, "mla_query", lambda: norm_of(attention, eps_change=lambda eps: 1e-6))


@mutant("mla_query", "forward", 1, "latent_norm_eps: 1e-6", choices={"latent_norm_eps": 1e-6})
def query_latent_epsilon_1e_5_though_declared_1e_6():
    return during(attention, "mla_query", lambda: norm_of(attention, eps_change=lambda eps: 1e-5))


@mutant("mla_keyvalue", "forward", 1, "latent_norm_eps 1e-5", "A05: transformers #44346")
def key_latent_epsilon_1e_6():
    return during(attention, "mla_keyvalue", lambda: norm_of(attention, eps_change=lambda eps: 1e-6))


@mutant("mla_keyvalue", "forward", 1, NORM)
def key_latent_epsilon_outside_the_root():
    return during(attention, "mla_keyvalue", lambda: norm_of(attention, outside=True))


@mutant("mla_query", "forward", 1, "the query latent is normed", "A05: Megatron-LM #6122")
def query_latent_not_normed():
    return during(attention, "mla_query", lambda: around(attention, "rms_norm", lambda o, x, w, eps: x * w))


@mutant("mla_keyvalue", "forward", 1, "the key latent is normed", "A05: Megatron-LM #6122")
def key_latent_not_normed():
    return during(attention, "mla_keyvalue", lambda: around(attention, "rms_norm", lambda o, x, w, eps: x * w))


@mutant("mla_keyvalue", "forward", 1, "the norm is over c alone, not over [c; r]", "A05: transformers #44346")
def key_latent_normed_with_r():
    def wrapper(original, latent, *args):
        c_size = args[1].kv_lora_rank
        root = torch.sqrt(latent.square().mean(-1, keepdim=True) + 1e-5)

        def norm(_, x, weight, eps):
            return weight * (x / root[..., : x.shape[-1]]) if x.shape[-1] == c_size else x

        with around(attention, "rms_norm", norm):
            return original(latent, *args)

    return around(attention, "mla_keyvalue", wrapper)


@mutant("moe_norm", "forward", 1, NORM)
def moe_norm_epsilon_outside_the_root():
    return during(layer, "feed_forward", lambda: norm_of(layer, outside=True))


@mutant("moe_norm", "forward", 1, NORM)
def moe_norm_mean_over_one_less():
    return during(layer, "feed_forward", lambda: norm_of(layer, denominator=lambda d: d - 1))


@mutant("moe_norm", "backward", STEPS, "the root depends on x")
def moe_norm_root_constant_backward():
    def wrapper(original, x, weight, eps):
        return weight * (x / torch.sqrt(x.detach().square().mean(-1, keepdim=True) + eps))

    return during(layer, "feed_forward", lambda: around(layer, "rms_norm", wrapper))


@mutant("head_norm", "forward", None, NORM)
def head_norm_epsilon_1e_6():
    return during(unroll, "head_norm", lambda: norm_of(layer, eps_change=lambda eps: 1e-6))


@mutant("head_norm", "forward", 1, NORM)
def head_norm_mean_over_one_less():
    return during(unroll, "head_norm", lambda: norm_of(layer, denominator=lambda d: d - 1))


@mutant("head_norm", "backward", None, "d w = sum of d_y x / rms")
def head_norm_gain_gradient_of_raw_features():
    def wrapper(original, x, weight, eps):
        y = original(x, weight.detach(), eps)
        return y + (weight - weight.detach()) * x.detach()

    return during(unroll, "head_norm", lambda: around(layer, "rms_norm", wrapper))


# -- projections -------------------------------------------------------------------------------------------------------


@mutant("mla_query", "forward", 1, "heads are rows of dn+dr", "A07: TPA #4")
def query_heads_interleaved():
    def wrapper(original, x, params, config, *args):
        heads = config.num_attention_heads
        w = params["self_attn.q_b_proj.weight"].unflatten(0, (-1, heads)).transpose(0, 1).flatten(0, 1)
        return original(x, params | {"self_attn.q_b_proj.weight": w}, config, *args)

    return around(attention, "mla_query", wrapper)


@mutant("mla_keyvalue", "forward", 1, "per head first dn rows keys, then dv rows values", "A07: ik_llama.cpp #2130")
def all_keys_before_all_values():
    def wrapper(original, latent, params, config, *args):
        h, dn, dv = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
        w = params["self_attn.kv_b_proj.weight"]
        keys, values = w[: h * dn].unflatten(0, (h, dn)), w[h * dn :].unflatten(0, (h, dv))
        return original(
            latent, params | {"self_attn.kv_b_proj.weight": torch.cat([keys, values], 1).flatten(0, 1)}, config, *args
        )

    return around(attention, "mla_keyvalue", wrapper)


@mutant("mla_keyvalue", "forward", 1, "key = [k_nope; r]")
def r_before_the_nope_part():
    def wrapper(original, *args):
        *rest, config, choices, record = args
        dr, dk = config.qk_rope_head_dim, config.query_head_dim

        def swapped(name, x):
            if name == "mla_keyvalue":
                x = torch.cat([x[..., dk - dr : dk], x[..., : dk - dr], x[..., dk:]], -1)
            return record(name, x)

        return original(*rest, config, choices, swapped)

    return around(attention, "mla_keyvalue", wrapper)


@mutant("mla_latent", "forward", 1, "[c; r] in this order")
def r_before_c():
    def wrapper(original, x, params, record):
        w = params["self_attn.kv_a_proj_with_mqa.weight"]
        return original(x, params | {"self_attn.kv_a_proj_with_mqa.weight": torch.cat([w[-6:], w[:-6]])}, record)

    return around(attention, "mla_latent", wrapper)


@mutant("mla_latent", "forward", 1, "r is never rotated (report 2.1.2)", "T04: SpecForge #244, #424; A04")
def r_rotated_in_the_latent():
    def wrapper(original, x, params, record):
        y = original(x, params)
        r = y[..., -6:].unflatten(-1, (3, 2))
        angle = torch.arange(x.shape[1]).reshape(1, -1, 1) * torch.tensor([1.0, 0.1, 0.01])
        a, b, c, s = r[..., 0], r[..., 1], angle.cos(), angle.sin()
        return record(
            "mla_latent", torch.cat([y[..., :-6], torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)], -1)
        )

    return around(attention, "mla_latent", wrapper)


@mutant("mla_keyvalue", "backward", STEPS, "r is shared by all heads: its gradient is their sum")
def r_gradient_of_the_first_head():
    def wrapper(original, latent, params, config, *args):
        dr = config.qk_rope_head_dim
        r = latent[..., -dr:]

        def quarter(name, x):
            if name != "mla_keyvalue":
                return args[-1](name, x)
            dk = config.query_head_dim
            repeated = r.detach().unsqueeze(-2).expand(*x.shape[:-1], dr).clone()
            repeated[..., 0, :] = r
            return args[-1](name, torch.cat([x[..., : dk - dr], repeated, x[..., dk:]], -1))

        return original(latent, params, config, *args[:-1], quarter)

    return around(attention, "mla_keyvalue", wrapper)


@mutant("mla_keyvalue", "backward", None, "d W = d_y^T x over all slots")
def key_weight_gradient_of_the_first_row_only():
    def wrapper(original, latent, params, *args):
        w = params["self_attn.kv_b_proj.weight"]
        name = "self_attn.kv_b_proj.weight"
        given = [params | {name: w if i == 0 else w.detach()} for i in range(len(latent))]
        rows = [original(latent[i : i + 1], given[i], *args[:-1]) for i in range(len(latent))]
        key, value = (torch.cat(parts) for parts in zip(*rows, strict=True))
        both_ = args[-1]("mla_keyvalue", torch.cat([key, value], -1))
        return both_.split([key.shape[-1], value.shape[-1]], -1)

    return around(attention, "mla_keyvalue", wrapper)


# -- what a slot sees --------------------------------------------------------------------------------------------------


def attend(change):
    """``change(query, keys, values, documents)`` -> the same four, before the attention."""
    return around(attention, "attention", lambda o, *args: o(*change(*args)))


def masked(change):
    """``change(visible, documents)``: which step-1 keys a slot sees."""
    return around(
        attention, "visible", lambda o, slots, documents, device: change(o(slots, documents, device), documents)
    )


def attention_with(
    query, keys, values, documents=None, *, scale=None, own=None, step_one=None, probs=None, softmax=None
):
    """The attention written out, each part replaceable."""
    compute = ops.wide(query.dtype)
    query, keys, values = query.to(compute), [k.to(compute) for k in keys], [v.to(compute) for v in values]
    hidden = ~attention.visible(query.shape[1], documents, query.device)
    hidden = (hidden if step_one is None else step_one(hidden, len(keys))).unsqueeze(2)
    scores = torch.einsum("bthd,bshd->bths", query, keys[0]).masked_fill(hidden, -torch.inf)
    later = [(query * k).sum(-1, keepdim=True) for k in keys[1:]]
    later = later if own is None else own(later)
    scores = torch.cat([scores, *later], -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    p = torch.softmax(scores, -1) if softmax is None else softmax(scores)
    p = p if probs is None else probs(p)
    slots = query.shape[1]
    output = torch.einsum("bths,bshv->bthv", p[..., :slots], values[0])
    for i, value in enumerate(values[1:]):
        output = output + p[..., slots + i, None] * value
    return output


def written_out(**wrong):
    return patch(attention, "attention", lambda *args: attention_with(*args, **wrong))


@mutant("attention", "forward", 2, VISIBLE, "T01: SafeAILab/EAGLE #247; SpecForge #244, #245")
def step_one_block_cut_back():
    def cut(hidden, steps):
        slots = hidden.shape[-1]
        late = torch.arange(slots) > torch.arange(slots).unsqueeze(-1) - (steps - 1)
        return hidden | (late & (torch.arange(slots) > 0) if steps > 1 else torch.zeros_like(late))

    return written_out(step_one=cut)


@mutant("attention", "forward", 3, VISIBLE, "T31: Model-Optimizer #2086")
def own_keys_missing_at_step_three():
    return attend(lambda q, k, v, d: (q, k[:1], v[:1], d) if len(k) == 3 else (q, k, v, d))


@mutant("attention", "forward", 2, VISIBLE)
def own_step_left_out():
    return attend(lambda q, k, v, d: (q, k[:-1], v[:-1], d) if len(k) > 1 else (q, k, v, d))


@mutant("attention", "forward", 3, VISIBLE)
def only_the_latest_own_key():
    return attend(lambda q, k, v, d: (q, [k[0], *k[1:][-1:]], [v[0], *v[1:][-1:]], d))


@mutant("attention", "forward", 2, VISIBLE)
def own_key_of_the_slot_before():
    roll = lambda xs: [xs[0], *(torch.cat([x[:, :1], x[:, :-1]], 1) for x in xs[1:])]  # noqa: E731
    return attend(lambda q, k, v, d: (q, roll(k), roll(v), d))


@mutant("attention", "forward", 2, VISIBLE)
def own_value_of_the_first_step():
    return attend(lambda q, k, v, d: (q, k, [v[0]] * len(v), d))


@mutant("attention", "forward", 2, VISIBLE, "T31: Model-Optimizer #2086")
def later_steps_see_all_slots():
    def wrapper(original, query, keys, values, documents):
        if len(keys) == 1:
            return original(query, keys, values, documents)
        shift = lambda xs: torch.cat(xs, 1)  # noqa: E731
        slots, steps = query.shape[1], len(keys)
        hidden = ~attention.visible(slots, documents, query.device).repeat(1, 1, steps)
        scores = torch.einsum("bthd,bshd->bths", query, shift(keys)) * query.shape[-1] ** -0.5
        p = torch.softmax(scores.masked_fill(hidden.unsqueeze(2), -torch.inf), -1)
        return torch.einsum("bths,bshv->bthv", p, shift(values))

    return around(attention, "attention", wrapper)


@mutant("attention", "forward", 1, "attention is document-local", "T24: NeMo-RL #3463; Automodel #3003")
def attention_crosses_documents():
    return attend(lambda q, k, v, d: (q, k, v, None))


@mutant("attention", "forward", 2, "attention is document-local at every step", "T31: Model-Optimizer #2086")
def documents_forgotten_beyond_step_one():
    return attend(lambda q, k, v, d: (q, k, v, d if len(k) == 1 else None))


@mutant("attention", "forward", 1, "slot j sees slots i <= j", "A10: tokenspeed #469")
def no_causal_mask():
    def change(seen, documents):
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        return (same & (documents != -1).unsqueeze(-1)) | seen

    return masked(change)


@mutant("attention", "forward", 1, "slot j sees slots i <= j", "T05: speculators #703")
def one_slot_of_the_future():
    def change(seen, documents):
        slots = seen.shape[-1]
        return seen | (
            torch.ones(slots, slots, dtype=torch.bool).tril(1) & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        )

    return masked(change)


@mutant("attention", "forward", 1, "a slot sees itself at step 1", "T05: speculators #703")
def slot_does_not_see_itself():
    def change(seen, documents):
        slots = seen.shape[-1]
        earlier = seen & ~torch.eye(slots, dtype=torch.bool)
        return torch.where(earlier.any(-1, keepdim=True), earlier, seen)

    return masked(change)


@mutant("attention", "forward", 1, "masked scores are -inf before the softmax", "T29: speculators #691 (31d68d77)")
def mask_added_as_a_number():
    def wrapper(query, keys, values, documents=None):
        seen = attention.visible(query.shape[1], documents, query.device).unsqueeze(2).to(query.dtype)
        with patch(attention, "visible", lambda slots, d, device: torch.ones(1, slots, slots, dtype=torch.bool)):
            own = [(query * k).sum(-1, keepdim=True) for k in keys[1:]]
            scores = torch.cat([torch.einsum("bthd,bshd->bths", query, keys[0]), *own], -1) * query.shape[-1] ** -0.5
            slots = query.shape[1]
            scores = torch.cat([scores[..., :slots] + seen, scores[..., slots:]], -1)
            p = torch.softmax(scores, -1)
        output = torch.einsum("bths,bshv->bthv", p[..., :slots], values[0])
        return output + sum(p[..., slots + i, None] * v for i, v in enumerate(values[1:]))

    return patch(attention, "attention", wrapper)


@mutant("attention", "forward", 1, "masked scores are -inf, not a large number", "T29")
def mask_fill_of_minus_ten():
    return written_out(softmax=lambda s: torch.softmax(torch.where(torch.isinf(s), -10.0, s), -1))


@mutant("attention", "forward", 1, "no output depends on positions (NoPE)", "T04: EAGLE 4947382; SpecForge #244, #424")
def keys_and_queries_rotated():
    def turn(x, shift):
        r = x[..., -6:].unflatten(-1, (3, 2))
        position = torch.arange(x.shape[1]).reshape(1, -1, 1, 1) + shift
        angle = position * torch.tensor([1.0, 0.1, 0.01])
        a, b, c, s = r[..., 0], r[..., 1], angle.cos(), angle.sin()
        return torch.cat([x[..., :-6], torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)], -1)

    return attend(lambda q, k, v, d: (turn(q, len(k) - 1), [turn(x, i) for i, x in enumerate(k)], v, d))


# -- the softmax -------------------------------------------------------------------------------------------------------


@mutant("attention", "forward", 1, SCALE, "A01: Megatron-LM #1501")
def scale_of_the_nope_width():
    return written_out(scale=12**-0.5)


@mutant("attention", "forward", 1, SCALE, "A01: maxtext #1370")
def scale_of_the_value_width():
    return written_out(scale=10**-0.5)


@mutant("attention", "forward", 1, SCALE, "A01")
def scale_inverted():
    return written_out(scale=18**0.5)


@mutant("attention", "forward", 1, "no context-extension factor", "A02: Megatron-LM #1429; Automodel #3348")
def context_factor_in_the_scale():
    return written_out(scale=18**-0.5 * (0.1 * torch.log(torch.tensor(64.0)).item() + 1) ** 2)


@mutant("attention", "forward", 2, "every score is scaled")
def own_scores_not_scaled():
    return written_out(own=lambda later: [s * 18**0.5 for s in later])


@mutant("attention", "forward", 2, "one softmax over all the scores", "A11: cutlass #2274")
def two_softmaxes_averaged():
    def softmax(scores):
        steps = 1 + scores.shape[-1] - scores.shape[1]
        if steps == 1:
            return torch.softmax(scores, -1)
        first, later = scores[..., : scores.shape[1]], scores[..., scores.shape[1] :]
        return torch.cat([torch.softmax(first, -1), torch.softmax(later, -1)], -1) / 2

    return written_out(softmax=softmax)


@mutant(
    "attention",
    "forward",
    None,
    "stable for every finite score",
    "A11: cutlass #2274; sglang #6101",
    methods=("attention",),
)
def softmax_without_its_maximum():
    return written_out(softmax=lambda s: (s / 1).exp() / s.exp().sum(-1, keepdim=True))


@mutant("attention", "forward", 1, "softmax in the accumulation format", "A11")
def softmax_in_bfloat16():
    return written_out(softmax=lambda s: torch.softmax(s.bfloat16(), -1).to(s.dtype))


@mutant("attention", "forward", 1, "probabilities are not rounded unless declared", "own", policy="bfloat16")
def probabilities_rounded_undeclared():
    return written_out(probs=lambda p: p.bfloat16().to(p.dtype))


@mutant("attention", "forward", 1, "the output is float32 where declared (report 2.1.2)", "own", policy="bfloat16")
def attention_output_in_bfloat16():
    return around(attention, "attention", lambda o, *args: o(*args).bfloat16().float())


@mutant("attention", "backward", STEPS, "the softmax's Jacobian", "own")
def probabilities_detached():
    return written_out(probs=lambda p: p.detach())


def merged(query, keys, values, documents=None, merge=lambda x: x):
    """The step-1 block and the own keys as two partial softmaxes, merged through their log-sum-exp."""
    compute = ops.wide(query.dtype)
    query, keys, values = query.to(compute), [k.to(compute) for k in keys], [v.to(compute) for v in values]
    scale = query.shape[-1] ** -0.5
    hidden = ~attention.visible(query.shape[1], documents, query.device).unsqueeze(2)
    scores = (torch.einsum("bthd,bshd->bths", query, keys[0]) * scale).masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    output = torch.einsum("bths,bshv->bthv", (scores - lse).exp(), values[0])
    for key, value in zip(keys[1:], values[1:], strict=True):
        score = (query * key).sum(-1, keepdim=True) * scale
        new = torch.logaddexp(lse, score)
        output = output * merge(lse - new).exp() + value * merge(score - new).exp()
        lse = new
    return output


@mutant("attention", "backward", STEPS, "the log-sum-exp of a merge has a gradient", "FlexAttention users")
def merge_weights_constant_backward():
    return patch(attention, "attention", lambda *args: merged(*args, merge=lambda x: x.detach()))


@mutant("attention", "backward", STEPS, "d query = sum over all keys")
def query_gradient_misses_own_keys():
    return written_out(own=lambda later: [backward(s, lambda d: 0 * d) for s in later])


@mutant("attention", "backward", STEPS, SCALE + ", backward too")
def scale_missing_backward():
    def wrapper(original, query, *args):
        return original(backward(query, lambda d: d * 18**0.5), *args)

    return around(attention, "attention", wrapper)


@mutant("attention", "forward", 1, "[B, T, H, dv] head-major", "A07: TPA #4; ik_llama.cpp #2130")
def heads_and_channels_transposed():
    return around(
        attention, "attention", lambda o, *args: o(*args).transpose(-1, -2).unflatten(-2, (-1,)).reshape(o(*args).shape)
    )


@mutant("attention", "forward", 1, "head h keeps its own values", "A07: ik_llama.cpp #2130")
def heads_reversed():
    return around(attention, "attention", lambda o, *args: o(*args).flip(-2))


@mutant("attention", "forward", 1, "slots keep their own rows", "A07: TPA #4")
def slots_and_heads_confused_by_a_reshape():
    return around(attention, "attention", lambda o, *args: o(*args).transpose(1, 2).reshape(o(*args).shape))


# -- gate and residual -------------------------------------------------------------------------------------------------

GATE = "o <- sigmoid(g_proj a) * o (report eq. 7)"


@mutant("attn_gate", "forward", 1, GATE, "A08: llmman #16; imp #1279")
def gate_dropped():
    def wrapper(original, x, output, params, record):
        original(x, output, params, lambda name, y: record(name, y) if name == "attn_gate.pre" else y)
        return record("attn_gate", output.to(x.dtype))

    return around(attention, "attn_gate", wrapper)


@mutant("attn_gate", "forward", 1, "the gate reads the normed input", "A08: TensorRT-LLM #9060")
def gate_on_another_input():
    return around(attention, "attn_gate", lambda o, x, *args: o(x.roll(1, -1), *args))


@mutant("attn_gate", "forward", 1, GATE, "A08: larql #439")
def gate_is_silu():
    def wrapper(original, x, output, params, record):
        pre = record("attn_gate.pre", attention.linear(x, params["self_attn.g_proj.weight"]))
        return record("attn_gate", torch.nn.functional.silu(pre) * output)

    return around(attention, "attn_gate", wrapper)


@mutant("attn_gate", "forward", 1, "the gate is flat, head-major", "A08: TensorRT-LLM #9060")
def gate_split_interleaved():
    def wrapper(original, x, output, params, record):
        w = params["self_attn.g_proj.weight"].unflatten(0, (-1, 4)).transpose(0, 1).flatten(0, 1)
        return original(x, output, params | {"self_attn.g_proj.weight": w}, record)

    return around(attention, "attn_gate", wrapper)


@mutant("attn_output", "forward", 1, "the gate stands before o_proj", "A08: imp #1279")
def gate_applied_twice():
    def wrapper(original, gated, params, residual, record):
        return original(gated * gated.abs().sqrt(), params, residual, record)

    return around(layer, "attn_output", wrapper)


@mutant("attn_gate", "backward", STEPS, "the gate is differentiated")
def gate_detached():
    def wrapper(original, x, output, params, record):
        pre = record("attn_gate.pre", attention.linear(x, params["self_attn.g_proj.weight"]))
        return record("attn_gate", torch.sigmoid(pre.detach()) * output)

    return around(attention, "attn_gate", wrapper)


@mutant("attn_gate", "backward", STEPS, "sigmoid' = s (1 - s)")
def gate_derivative_without_one_minus_s():
    def wrapper(original, x, output, params, record):
        pre = record("attn_gate.pre", attention.linear(x, params["self_attn.g_proj.weight"]))
        s = torch.sigmoid(pre.detach())
        return record("attn_gate", (s + s * (pre - pre.detach())) * output)

    return around(attention, "attn_gate", wrapper)


@mutant("attn_output", "forward", 1, "x1 = x0 + o_proj o")
def residual_left_out():
    return around(
        layer, "attn_output", lambda o, gated, params, residual, record: o(gated, params, 0 * residual, record)
    )


@mutant("attn_output", "forward", 1, "x1 = x0 + o_proj o")
def residual_is_the_normed_input():
    return around(layer, "attention_input", lambda o, *args: (o(*args)[0],) * 2)


@mutant("attn_output", "forward", 1, "in eagle3 x1 = f + o_proj o", layout="eagle3")
def residual_is_the_embedding_in_eagle3():
    return around(
        layer, "attention_input", lambda o, embedding, feature, *args: (o(embedding, feature, *args)[0], embedding)
    )


@mutant("attn_output", "backward", STEPS, "the residual path carries a gradient")
def residual_detached():
    return around(
        layer, "attn_output", lambda o, gated, params, residual, record: o(gated, params, residual.detach(), record)
    )


@mutant("attn_output", "forward", 1, "every column of o_proj counts")
def last_column_of_o_proj_dropped():
    def wrapper(original, gated, params, residual, record):
        w = params["self_attn.o_proj.weight"]
        return original(
            gated, params | {"self_attn.o_proj.weight": torch.cat([w[:, :-1], 0 * w[:, -1:]], 1)}, residual, record
        )

    return around(layer, "attn_output", wrapper)


@mutant("attn_output", "forward", 1, "every row is computed", "own")
def one_stale_row():
    def wrapper(original, gated, params, residual, record):
        stale = torch.cat([gated[:, :3], gated[:, 2:3], gated[:, 4:]], 1) if gated.shape[1] > 4 else gated
        return original(stale, params, residual, record)

    return around(layer, "attn_output", wrapper)


@mutant("mla_query", "forward", 1, "every term of a product counts")
def one_weight_has_the_wrong_sign():
    def wrapper(original, x, params, *args):
        w = params["self_attn.q_b_proj.weight"].clone()
        w[5, 7] = -w[5, 7]
        return original(x, params | {"self_attn.q_b_proj.weight": w}, *args)

    return around(attention, "mla_query", wrapper)
