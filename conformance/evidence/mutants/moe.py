"""Wrong routers, experts, activations and dense MLPs."""

import torch

from draftconf.fast import layer, moe, ops, unroll

from .core import STEPS, area, around, backward, both, during, norm_with, patch, with_gradient_of

MUTANTS: list = []
mutant = area("experts", MUTANTS)
MOE = moe.MOE
ROUTE = "weights s_i / sum of the chosen s, times the factor; the bias never enters (report eq. 13)"
TOP = "the n experts with the largest s + bias"
SITU = "beta1 tanh(g/beta1) sigmoid(g) beta2 tanh(u/beta2) (report eq. 12, 19)"


# -- router ------------------------------------------------------------------------------------------------------------


def scored(change):
    """``change(x, weight)`` -> scores."""
    return patch(moe, "router_scores", change)


@mutant("router_scores", "forward", 1, "s = sigmoid(gate h)", "E22: vLLM #31246")
def softmax_router():
    return scored(lambda x, w: torch.softmax(ops.linear(x, w, ops.wide(x.dtype)), -1))


@mutant("router_scores", "forward", 1, "the router is float32 where declared", "AstrAI #57", policy="bfloat16")
def router_in_bfloat16():
    return scored(lambda x, w: torch.sigmoid(ops.linear(x, w.bfloat16(), torch.bfloat16)).float())


@mutant("router_scores", "forward", 1, "the router is float32 where declared", "TensorRT-LLM #13328")
def router_logits_rounded_to_bfloat16():
    return scored(lambda x, w: torch.sigmoid(ops.linear(x, w, ops.wide(x.dtype)).bfloat16().to(x.dtype)))


@mutant("router_scores", "forward", 1, "the router reads h, normed once", "E11: llama.cpp #26185; Automodel #1895")
def router_input_normed_twice():
    return around(moe, "router_scores", lambda o, x, w: o(ops.rms_norm(x, torch.ones_like(x[0, 0]), 1e-5), w))


@mutant("router_scores", "forward", 1, "the router reads h, not what precedes its norm", "E11: Automodel #1895")
def router_reads_the_residual():
    def wrapper(original, x, params, *args, **kwargs):
        inner = around(moe, "router_scores", lambda o, h, w: o(x, w))
        with inner:
            return original(x, params, *args, **kwargs)

    return around(layer, "feed_forward", wrapper)


@mutant("router_scores", "forward", 1, "the bias is not part of s", "E01: MetaX vLLM #270")
def bias_inside_the_sigmoid():
    def wrapper(original, x, params, *args):
        bias = params[MOE + "gate.e_score_correction_bias"]
        with scored(lambda h, w: torch.sigmoid(ops.linear(h, w, ops.wide(h.dtype)) + bias)):
            return original(x, params, *args)

    return around(layer, "moe", wrapper)


@mutant("router_scores", "backward", STEPS, "the router is trained through the weights", "E20: Automodel #2995")
def router_input_detached():
    return around(moe, "router_scores", lambda o, x, w: o(x.detach(), w))


def routed(change):
    """``change(scores, bias, config, choices)`` -> weights, experts."""
    return patch(
        moe, "route", lambda scores, bias, config, choices, experts=None: change(scores, bias, config, choices)
    )


def top(key, count):
    return torch.topk(key.detach(), count, -1).indices


def normalised(scores, experts, config, epsilon=0.0, factor=None):
    chosen = torch.gather(scores, -1, experts)
    factor = config.routed_scaling_factor if factor is None else factor
    return chosen / (chosen.sum(-1, keepdim=True) + epsilon) * factor


@mutant("route", "forward", 1, ROUTE, "E01: MetaX vLLM #270, #284; sgl-kernel-xpu #180")
def bias_leaks_into_the_weights():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return normalised(scores + bias, experts, config), experts

    return routed(change)


@mutant("route", "forward", 1, ROUTE, "E01: sgl-kernel-xpu #180")
def scores_recovered_by_subtraction():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return normalised((scores + bias) - bias, experts, config), experts

    return routed(change)


@mutant(
    "route", "decision", 1, "the bias has the router's format", "E02: vLLM #50761; TensorRT-LLM #17061; Automodel #3348"
)
def bias_rounded_to_bfloat16():
    return around(moe, "route", lambda o, s, bias, *args: o(s, bias.bfloat16().to(bias.dtype), *args))


@mutant("route", "decision", 1, TOP, "E01")
def bias_ignored():
    return around(moe, "route", lambda o, s, bias, *args: o(s, 0 * bias, *args))


@mutant("route", "decision", 1, TOP)
def bias_subtracted():
    return around(moe, "route", lambda o, s, bias, *args: o(s, -bias, *args))


@mutant("route", "decision", 1, TOP)
def smallest_experts_chosen():
    def change(scores, bias, config, choices):
        experts = top(-scores - bias, config.num_experts_per_token)
        return normalised(scores, experts, config), experts

    return routed(change)


@mutant("route", "decision", 1, "a set of n: its order says nothing", "sglang #8125")
def last_slot_taken_for_the_smallest():
    def change(scores, bias, config, choices):
        key = (scores + bias).detach()
        experts = top(key, config.num_experts_per_token + 1)
        experts = torch.cat([experts[..., :-2].flip(-1)[..., 1:], experts[..., -2:]], -1)  # drops the wrong one
        return normalised(scores, experts, config), experts

    return routed(change)


@mutant("route", "decision", 1, "distinct experts, equal scores included", "E08: vLLM #54403; flashinfer #4404")
def exclusion_by_value():
    def change(scores, bias, config, choices):
        key, ids = (scores + bias).detach(), []
        for _ in range(config.num_experts_per_token):
            largest = key.amax(-1, keepdim=True)
            ids.append(key.argmax(-1))
            key = torch.where(key == largest, -torch.inf, key)  # a tied expert goes with it
        experts = torch.stack(ids, -1)
        return normalised(scores, experts, config), experts

    return routed(change)


@mutant("route", "decision", 1, "scores of any size", "E10: vLLM #31478")
def running_maximum_starts_at_minus_one():
    def change(scores, bias, config, choices):
        key, ids = (scores + bias).detach(), []
        for _ in range(config.num_experts_per_token):
            best = torch.where(key > -1, key, -1.0)
            ids.append(best.argmax(-1))
            key = key.scatter(-1, ids[-1].unsqueeze(-1), -torch.inf)
        experts = torch.stack(ids, -1)
        return normalised(scores, experts, config), experts

    return routed(change)


@mutant("route", "decision", 1, "each token has experts of its own", "E23: sglang #15250")
def experts_of_the_first_slot_for_all():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        experts = experts[:, :1].expand_as(experts)
        return normalised(scores, experts, config), experts

    return routed(change)


@mutant("route", "decision", 1, "distinct experts", "E23: sglang #40187")
def one_expert_twice():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        experts = torch.cat([experts[..., :-1], experts[..., :1]], -1)
        return normalised(scores, experts, config), experts

    return routed(change)


def weights(change):
    """``change(weights)`` of the routing weights, the experts as they are."""
    return around(moe, "route", lambda o, *args: (change(o(*args)[0]), o(*args)[1]))


@mutant("route", "forward", 1, "the routed scaling factor", "E05: vLLM #24119; sglang #8511")
def scaling_factor_missing():
    return around(
        moe,
        "route",
        lambda o, s, b, config, *args: (
            o(s, b, config, *args)[0] / config.routed_scaling_factor,
            o(s, b, config, *args)[1],
        ),
    )


@mutant("route", "forward", 1, "the routed scaling factor, once", "E05: vLLM #45037; sglang #8333")
def scaling_factor_applied_twice():
    return around(
        moe,
        "route",
        lambda o, s, b, config, *args: (
            o(s, b, config, *args)[0] * config.routed_scaling_factor,
            o(s, b, config, *args)[1],
        ),
    )


@mutant("route", "forward", 1, ROUTE, "E22: sglang #35160")
def not_renormalised():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return torch.gather(scores, -1, experts) * config.routed_scaling_factor, experts

    return routed(change)


@mutant("route", "forward", 1, ROUTE, "E22: vLLM #31246")
def renormalised_over_all_experts():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return torch.gather(scores / scores.sum(-1, keepdim=True), -1, experts) * config.routed_scaling_factor, experts

    return routed(change)


@mutant("route", "forward", 1, "weights from scores, not logits", "E22: vLLM #31246")
def logits_for_weights():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return torch.softmax(
            torch.gather(torch.logit(scores, 1e-6), -1, experts), -1
        ) * config.routed_scaling_factor, experts

    return routed(change)


@mutant("route", "forward", 1, "no epsilon (O renormalize_epsilon 0)", "E04: sglang #38320; AutoModel adds 1e-20")
def epsilon_of_1e_20():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return normalised(scores, experts, config, 1e-20), experts

    return routed(change)


@mutant("route", "forward", 1, "no epsilon", "E04: tt-metal #33153; DeepSeek-MoE #33")
def epsilon_of_1e_6():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return normalised(scores, experts, config, 1e-6), experts

    return routed(change)


@mutant("route", "forward", 1, "renormalize_epsilon: 1e-20", "E04", choices={"renormalize_epsilon": 1e-20})
def no_epsilon_though_declared():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        return normalised(scores, experts, config), experts

    return routed(change)


@mutant("route", "backward", STEPS, "the renormalisation has a Jacobian", "E20: Automodel #2995")
def renormalisation_constant_backward():
    def change(scores, bias, config, choices):
        experts = top(scores + bias, config.num_experts_per_token)
        chosen = torch.gather(scores, -1, experts)
        return chosen / chosen.detach().sum(-1, keepdim=True) * config.routed_scaling_factor, experts

    return routed(change)


@mutant("route", "forward", 1, "weights stay in the router's format", "own", policy="bfloat16")
def weights_rounded_to_bfloat16():
    return weights(lambda w: w.bfloat16().float())


@mutant(
    "route",
    "frozen",
    None,
    "the router's bias gets no gradient",
    "F10: PaddleFormers #4773; Megatron-LM #7021",
    methods=("route",),
)
def router_bias_trained():
    return _bias_gradient("route", "gate.e_score_correction_bias")


def _bias_gradient(method, name):
    from ...adapters.fast import FastAdapter

    def wrapper(original, self, inputs, **kwargs):
        outputs, grads, *rest = original(self, inputs, **kwargs)
        return outputs, grads | {name: inputs[name]}, *rest

    return around(FastAdapter, method, wrapper)


# -- experts -----------------------------------------------------------------------------------------------------------


def activated(change):
    """``change(gate, up, beta, linear_beta)`` in the experts only."""
    return during(moe, "expert_hidden", lambda: patch(moe, "situ_glu", change))


@mutant("expert_hidden", "forward", 1, "caps 4 and 25", "E14: cudnn-frontend #670; TensorRT-LLM #17865")
def caps_of_one():
    return activated(lambda g, u, *_: ops.situ_glu(g, u, 1.0, 1.0))


@mutant("expert_hidden", "forward", 1, "caps 4 and 25", "E14: Automodel kimi_k3")
def linear_cap_of_one():
    return activated(lambda g, u, beta, linear: ops.situ_glu(g, u, beta, 1.0))


@mutant("expert_hidden", "forward", 1, "the gate's cap is 4, the other 25", "E14: sglang #34883")
def caps_swapped():
    return activated(lambda g, u, beta, linear: ops.situ_glu(g, u, linear, beta))


@mutant("expert_hidden", "forward", 1, SITU, "E17: vLLM #52240, #44893, #52442")
def gate_and_up_swapped():
    return activated(lambda g, u, *caps: ops.situ_glu(u, g, *caps))


@mutant("expert_hidden", "forward", 1, "w1 is the gate, w3 the up projection", "E17: sglang #26884; tokenspeed #314")
def w1_and_w3_swapped():
    return around(moe, "expert_hidden", lambda o, zq, q, *args: o(zq, q | {"w1": q["w3"], "w3": q["w1"]}, *args))


@mutant("expert_hidden", "forward", 1, "gate rows and up rows are stacked, not interleaved", "E17: vLLM #52240")
def gate_and_up_interleaved():
    def wrapper(original, zq, q, *args):
        pairs = [torch.stack([a, b], 1).flatten(0, 1).chunk(2) for a, b in zip(q["w1"], q["w3"], strict=True)]
        return original(zq, q | {"w1": tuple(p[0] for p in pairs), "w3": tuple(p[1] for p in pairs)}, *args)

    return around(moe, "expert_hidden", wrapper)


@mutant("expert_hidden", "forward", 1, SITU, "SwiGLU of other models")
def swiglu_in_the_experts():
    return activated(lambda g, u, *_: torch.nn.functional.silu(g) * u)


@mutant("expert_hidden", "forward", 1, SITU, "E14: sglang #34883")
def up_clamped_instead_of_tanh():
    def change(g, u, beta, linear):
        return ops.situ_glu(g, torch.zeros_like(u), beta, linear) + beta * torch.tanh(g / beta) * torch.sigmoid(
            g
        ) * u.clamp(-linear, linear)

    return activated(change)


@mutant("expert_hidden", "forward", 1, "tanh in the accumulation format", "E16: cudnn-frontend #645")
def tanh_in_bfloat16():
    def change(g, u, beta, linear):
        situ = beta * torch.tanh((g / beta).bfloat16()).to(g.dtype) * torch.sigmoid(g)
        return situ * (linear * torch.tanh(u / linear))

    return activated(change)


@mutant("expert_hidden", "forward", 1, SITU)
def tanh_by_its_series():
    def change(g, u, beta, linear):
        t = u / linear
        return (
            beta
            * torch.tanh(g / beta)
            * torch.sigmoid(g)
            * linear
            * torch.where(t.abs() < 0.5, t - t**3 / 3 + 2 * t**5 / 15, torch.tanh(t))
        )

    return activated(change)


class _Situ(torch.autograd.Function):
    """SiTU-GLU with a derivative that is wrong as ``fault`` says."""

    @staticmethod
    def forward(ctx, g, u, beta, linear, fault):
        ctx.save_for_backward(g, u)
        ctx.rest = beta, linear, fault
        return ops.situ_glu(g, u, beta, linear)

    @staticmethod
    def backward(ctx, d):
        (g, u), (beta, linear, fault) = ctx.saved_tensors, ctx.rest
        a, s, t = torch.tanh(g / beta), torch.sigmoid(g), torch.tanh(u / linear)
        d_tanh, d_sigmoid, d_up = 1 - a * a, s * (1 - s), 1 - t * t
        d_tanh = 1.0 if fault == "tanh" else d_tanh
        d_sigmoid = 0.0 if fault == "sigmoid" else d_sigmoid
        d_up = 1.0 if fault == "up" else d_up
        if fault == "low":
            d_tanh = (1 - a.bfloat16() ** 2).to(g.dtype)
        return d * linear * t * (d_tanh * s + beta * a * d_sigmoid), d * beta * a * s * d_up, None, None, None


def derivative(fault, module_method="expert_hidden"):
    return during(moe, module_method, lambda: patch(moe, "situ_glu", lambda *args: _Situ.apply(*args, fault)))


@mutant("expert_hidden", "backward", STEPS, "d gate has two terms", "E16: cudnn-frontend #568")
def derivative_of_the_sigmoid_missing():
    return derivative("sigmoid")


@mutant("expert_hidden", "backward", STEPS, "the gate's gradient ends at its cap", "E16: TransformerEngine #3402")
def gradient_passes_the_gates_cap():
    return derivative("tanh")


@mutant("expert_hidden", "backward", STEPS, "the gradient of up ends at its cap", "E16: TransformerEngine #3402")
def gradient_passes_the_linear_cap():
    return derivative("up")


@mutant("expert_hidden", "backward", STEPS, "derivatives in the accumulation format", "E16: cudnn-frontend #645")
def derivative_in_bfloat16():
    return derivative("low")


@mutant("shared_experts", "backward", STEPS, "the gradient of up ends at its cap", "E16")
def shared_gradient_passes_the_linear_cap():
    return derivative("up", "_mlp")


@mutant("expert_hidden", "forward", 1, "each pair uses its own expert", "E23: Megatron-LM #5231; mlx-lm #508")
def experts_off_by_one():
    return around(moe, "expert_linear", lambda o, x, weights, *args: o(x, weights[1:] + weights[:1], *args))


@mutant("expert_hidden", "forward", 1, "the last expert is an expert", "E23: sglang #15250")
def last_expert_dropped():
    return around(moe, "expert_linear", lambda o, x, weights, *args: o(x, (*weights[:-1], 0 * weights[-1]), *args))


@mutant("expert_hidden", "forward", 1, "pairs return to their tokens", "E23: Megatron-LM #5231")
def wrong_inverse_permutation():
    def wrapper(original, experts, count):
        groups = original(experts, count)
        return groups._replace(inverse=groups.order)

    return around(moe, "group_by_expert", wrapper)


@mutant("expert_output", "forward", 1, "each pair uses its own expert", "E23: mlx-lm #508")
def second_product_of_the_next_expert():
    return around(moe, "expert_output", lambda o, h, q, *args: o(h, q | {"w2": q["w2"][1:] + q["w2"][:1]}, *args))


@mutant("expert_hidden", "forward", None, "every token of an expert is computed", "E19: kvcache-ai/sglang #68")
def only_the_first_rows_of_an_expert():
    def wrapper(original, x, weights, groups, dtype):
        y = original(x, weights, groups, dtype)
        late = torch.cat([torch.arange(c) for c in groups.counts])[groups.inverse] >= 14
        return torch.where(late.unsqueeze(-1), 0, y)

    return around(moe, "expert_linear", wrapper)


@mutant(
    "expert_hidden",
    "forward",
    None,
    "the weights of eq. 11 stand after the down projection",
    "E13: flashinfer #4366; vLLM #43694",
)
def weight_on_the_experts_input():
    def wrapper(original, zq, quantized, groups, config, record):
        return original(zq * 1.25, quantized, groups, config, record)

    return around(moe, "expert_hidden", wrapper)


@mutant("mx_hidden", "forward", 1, "routing_weight: after_down", "E13: vLLM #43694; Automodel kimi_k3")
def weight_before_the_quantiser():
    def mx_hidden(original, hidden, weights, choices, record):
        return original(weights.unsqueeze(-1) * hidden, weights, choices, record)

    def combine(original, output, weights, choices, record):
        return record("moe_combine", output.sum(-2))

    return both(around(moe, "mx_hidden", mx_hidden), around(moe, "moe_combine", combine))


@mutant("mx_hidden", "forward", 1, "routing_weight: before_down", "E13", choices={"routing_weight": "before_down"})
def weight_after_down_though_declared_before():
    def mx_hidden(original, hidden, weights, choices, record):
        return original(hidden, weights, choices.replace(routing_weight="after_down"), record)

    def combine(original, output, weights, choices, record):
        return original(output, weights, choices.replace(routing_weight="after_down"), record)

    return both(around(moe, "mx_hidden", mx_hidden), around(moe, "moe_combine", combine))


@mutant("moe_combine", "forward", 1, "the weight is applied once", "E13: flashinfer #4366")
def weight_applied_twice():
    return around(moe, "moe_combine", lambda o, y, w, *args: o(y, w * w, *args))


@mutant("moe_combine", "forward", 1, "u = sum of weight x expert output (report eq. 11)")
def mean_instead_of_weighted_sum():
    return around(moe, "moe_combine", lambda o, y, w, *args: o(y, torch.full_like(w, 1 / w.shape[-1]) + 0 * w, *args))


@mutant("moe_combine", "forward", 1, "weights go with their experts", "sglang #8125")
def weights_in_another_order_than_experts():
    return around(moe, "moe_combine", lambda o, y, w, *args: o(y, w.flip(-1), *args))


@mutant("moe_combine", "backward", STEPS, "the weights are differentiated", "E20: Automodel #2995 (8a83fdcee)")
def combine_weights_detached():
    return around(moe, "moe_combine", lambda o, y, w, *args: o(y, w.detach(), *args))


@mutant("moe_combine", "backward", STEPS, "an expert's output gets weight x cotangent", "E16")
def expert_outputs_unweighted_backward():
    def wrapper(original, y, w, choices, record):
        right = (w.unsqueeze(-1) * y).sum(-2)
        return record("moe_combine", with_gradient_of(right, y.sum(-2) + (w.unsqueeze(-1) * y.detach()).sum(-2)))

    return around(moe, "moe_combine", wrapper)


@mutant("latent_norm", "forward", 1, "RMSNorm(u; routed_expert_norm) (report 2.3.1)", "latent_moe_use_norm")
def latent_norm_left_out():
    return around(moe, "latent_norm", lambda o, u, params, config, record: record("latent_norm", u + 0))


@mutant("latent_norm", "forward", 1, "eps 1e-5")
def latent_norm_epsilon_1e_6():
    return during(moe, "latent_norm", lambda: around(moe, "rms_norm", norm_with(eps_change=lambda eps: 1e-6)))


@mutant("latent_norm", "forward", 1, "sqrt(mean(x^2) + eps)")
def latent_norm_epsilon_outside_the_root():
    return during(moe, "latent_norm", lambda: around(moe, "rms_norm", norm_with(outside=True)))


@mutant("latent_down", "forward", 1, "the latent reads h", "E11: llama.cpp #26185")
def latent_reads_shuffled_features():
    return around(moe, "latent_down", lambda o, x, *args: o(x.flip(-1), *args))


@mutant("latent_down", "backward", STEPS, "h gets a gradient from the experts too")
def experts_input_detached():
    return around(moe, "latent_down", lambda o, x, *args: o(x.detach(), *args))


# -- shared experts and the dense MLP ----------------------------------------------------------------------------------


@mutant("layer_output", "forward", 1, "x1 + shared_experts + routed_expert_up_proj latent_norm")
def shared_experts_left_out():
    return around(moe, "shared_experts", lambda o, *args: 0 * o(*args))


@mutant("shared_experts", "forward", 1, "the S shared experts as one wide MLP", "some models average them")
def shared_experts_averaged():
    def wrapper(original, x, params, config, record):
        return record(
            "shared_experts", original(x, params, config, lambda n, y: y if n == "shared_experts" else record(n, y)) / 2
        )

    return around(moe, "shared_experts", wrapper)


@mutant("shared_experts", "forward", 1, "the S shared experts as one wide MLP")
def only_the_first_shared_expert():
    def wrapper(original, x, params, config, record):
        w = params[MOE + "shared_experts.down_proj.weight"]
        keep = torch.arange(w.shape[1]) < w.shape[1] // config.num_shared_experts
        return original(x, params | {MOE + "shared_experts.down_proj.weight": w * keep}, config, record)

    return around(moe, "shared_experts", wrapper)


@mutant("shared_experts", "forward", 1, "the shared experts are SiTU-GLU too", "AutoModel's dense layers")
def swiglu_in_the_shared_experts():
    return during(moe, "_mlp", lambda: patch(moe, "situ_glu", lambda g, u, *_: torch.nn.functional.silu(g) * u))


@mutant("dense_mlp", "forward", 1, "the dense MLP is SiTU-GLU", "EAGLE and SpecForge: SwiGLU", layout="eagle3")
def swiglu_in_the_dense_mlp():
    return during(moe, "_mlp", lambda: patch(moe, "situ_glu", lambda g, u, *_: torch.nn.functional.silu(g) * u))


@mutant("dense_mlp", "forward", 1, "caps 4 and 25", "E14", layout="eagle3")
def dense_caps_swapped():
    return during(moe, "_mlp", lambda: patch(moe, "situ_glu", lambda g, u, a, b: ops.situ_glu(g, u, b, a)))


@mutant("dense_mlp", "backward", STEPS, "the gradient of up ends at its cap", "E16", layout="eagle3")
def dense_gradient_passes_the_linear_cap():
    return derivative("up", "_mlp")


@mutant("shared_experts", "forward", 1, "the shared experts read h", "own")
def shared_experts_read_the_residual():
    def wrapper(original, x, params, *args, **kwargs):
        with around(moe, "shared_experts", lambda o, h, *rest: o(x, *rest)):
            return original(x, params, *args, **kwargs)

    return around(layer, "feed_forward", wrapper)


@mutant("layer_output", "forward", 1, "the factor scales routed experts only", "E05: kvcache-ai #86")
def factor_on_the_shared_experts():
    return around(moe, "shared_experts", lambda o, *args: 1.5 * o(*args))


@mutant("layer_output", "forward", 1, "x1 + shared + routed")
def residual_of_the_block_left_out():
    def wrapper(original, x, *args):
        with patch(layer, "moe", lambda *a: moe_of(*a) - x):
            return original(x, *args)

    moe_of = layer.moe
    return around(layer, "feed_forward", wrapper)


@mutant("layer_output", "forward", 1, "routed_expert_up_proj reads the normed latent")
def up_projection_transposed_rows():
    def wrapper(original, x, params, *args):
        name = MOE + "routed_expert_up_proj.weight"
        return original(x, params | {name: params[name].flip(0)}, *args)

    return around(layer, "moe", wrapper)


@mutant("layer_output", "backward", STEPS, "the shared experts are trained")
def shared_output_detached():
    return around(moe, "shared_experts", lambda o, *args: o(*args).detach())


@mutant("layer_output", "backward", STEPS, "the routed experts are trained")
def routed_output_detached():
    return around(moe, "latent_norm", lambda o, *args: o(*args).detach())


@mutant("layer_output", "backward", STEPS, "the residual path carries a gradient")
def block_residual_detached():
    def wrapper(original, x, *args):
        right = original(x, *args[:-1], lambda name, y: y if name == "layer_output" else args[-1](name, y))
        return args[-1]("layer_output", right - x + x.detach())

    return around(layer, "feed_forward", wrapper)


@mutant("shared_experts", "backward", STEPS, "h gets a gradient from the shared experts")
def shared_input_detached():
    return around(moe, "shared_experts", lambda o, x, *args: o(x.detach(), *args))


@mutant("expert_output", "backward", STEPS, "d hidden = d_y W2")
def one_expert_gives_no_input_gradient():
    def wrapper(original, hidden, quantized, groups, record):
        experts = torch.repeat_interleave(torch.arange(len(groups.counts)), torch.tensor(groups.counts))[groups.inverse]
        keep = (experts != 3).reshape(*hidden.shape[:-1], 1)
        return original(backward(hidden, lambda d: d * keep), quantized, groups, record)

    return around(moe, "expert_output", wrapper)


@mutant("expert_output", "backward", None, "d W2 = d_y^T hidden over the expert's tokens")
def expert_gradient_of_its_first_token_only():
    def wrapper(original, params, config, choices):
        quantized = original(params, config, choices)
        return quantized | {
            "w2": tuple(backward(w, lambda d: d * 0.99) if e == 3 else w for e, w in enumerate(quantized["w2"]))
        }

    return around(unroll, "quantize_experts", wrapper)
