"""Stable LatentMoE: sigmoid router, MX-quantised experts in a latent space, shared experts (spec.md section 4)."""

from typing import NamedTuple

import torch
from torch import Tensor

from .grouped import grouped_linear
from .mx import fake_quantize
from .ops import keep, linear, rms_norm, situ_glu, wide

MOE = "block_sparse_moe."


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """sigmoid(gate x), wide (report eq. 13). x [..., d], weight [E, d] -> [..., E]."""
    return torch.sigmoid(linear(x, weight, wide(x.dtype)))


def route(scores: Tensor, bias: Tensor, config, choices, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights [..., n] and expert ids int64 [..., n] of scores [..., E]; given ``experts`` are used as they are.

    The bias only chooses. The chosen scores are divided by their sum and multiplied by the factor (report eq. 13).
    """
    if experts is None:
        experts = torch.topk(scores.detach() + bias.detach(), config.num_experts_per_token, dim=-1).indices
    chosen = torch.gather(scores, -1, experts)  # [..., n]
    total = chosen.sum(-1, keepdim=True) + choices.renormalize_epsilon
    return chosen / total * config.routed_scaling_factor, experts


class Groups(NamedTuple):
    """Routed pairs sorted by expert: ``order`` [P] sorts, ``inverse`` [P] restores, ``counts`` pairs per expert."""

    order: Tensor
    inverse: Tensor
    counts: list[int] | Tensor  # a tensor [E] under torch.compile, which may not wait for it


def group_by_expert(experts: Tensor, num_experts: int) -> Groups:
    """experts [..., n], whose P entries are the routed pairs in row-major order."""
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    counts = flat.new_zeros(num_experts).index_add(0, flat, torch.ones_like(flat))
    return Groups(order, inverse, counts if torch.compiler.is_compiling() else counts.tolist())


def expert_linear(x: Tensor, weights: tuple[Tensor, ...], groups: Groups, dtype: torch.dtype) -> Tensor:
    """Each routed pair times its expert's weight. x [P, in], weights E of [out, in] -> [P, out] in ``dtype``.

    Under torch.compile as one operator.
    """
    rows = x[groups.order]
    if torch.compiler.is_compiling():
        compute = wide(x.dtype)
        products = grouped_linear(rows.to(compute), torch.stack(weights).to(compute), groups.counts)
        return products.to(dtype)[groups.inverse]
    parts = rows.split(groups.counts)
    products = [linear(r, weight, dtype) for r, weight in zip(parts, weights, strict=True) if len(r)]
    return torch.cat(products)[groups.inverse]


def quantize_experts(params: dict, config, choices) -> dict[str, tuple[Tensor, ...]]:
    """MXFP4 values of every expert's weights, wide: "w1", "w3", "w2" -> E tensors, in one node of the graph.

    ``unbind`` gives an expert that no token reached a gradient of exact zeros.
    """
    experts = {}
    for which in ("w1", "w3", "w2"):
        names = [f"{MOE}experts.{e}.{which}.weight" for e in range(config.num_experts)]
        stacked = torch.stack([params[name] for name in names])  # [E, out, in]
        stacked = fake_quantize(stacked, "mxfp4", choices.mx_scale_rule, choices.quantize_source, choices.ste)
        experts[which] = stacked.to(wide(stacked.dtype)).unbind(0)
    return experts


def quantize_activations(x: Tensor, choices) -> Tensor:
    """MXFP8 values of x [..., 32n]."""
    format = "mxfp8_" + choices.mxfp8_element
    return fake_quantize(x, format, choices.mx_scale_rule, choices.quantize_source, choices.ste)


def latent_down(x: Tensor, params: dict, record=keep) -> Tensor:
    """routed_expert_down_proj x. [..., d] -> [..., l]."""
    return record("latent_down", linear(x, params[MOE + "routed_expert_down_proj.weight"]))


def mx_input(z: Tensor, choices, record=keep) -> Tensor:
    """MXFP8 of the latent token, once for all its experts. [..., l] -> [..., l]."""
    return record("mx_input", quantize_activations(z, choices))


def expert_hidden(zq: Tensor, quantized: dict, groups: Groups, config, record=keep) -> Tensor:
    """SiTU-GLU(W1q zq, W3q zq) per routed pair (report eq. 12). zq [..., l] -> [..., n, m]."""
    num, shape = config.num_experts_per_token, zq.shape[:-1]
    # Widened before it is repeated, so that the gradients of its 2n uses are summed wide and rounded once.
    pairs = zq.to(wide(zq.dtype)).flatten(0, -2).repeat_interleave(num, dim=0)  # [P, l]
    gate, up = (
        record(name, expert_linear(pairs, quantized[which], groups, zq.dtype).unflatten(0, (*shape, num)))
        for name, which in (("expert_hidden.gate", "w1"), ("expert_hidden.up", "w3"))
    )  # [..., n, m]
    hidden = situ_glu(gate, up, config.activation_situ_beta, config.activation_situ_linear_beta)
    return record("expert_hidden", hidden)


def mx_hidden(hidden: Tensor, weights: Tensor, choices, record=keep) -> Tensor:
    """MXFP8 of the experts' hidden, times the routing weight before that with ``before_down``. [..., n, m]."""
    if choices.routing_weight == "before_down":
        hidden = record("expert_weighted", (weights.unsqueeze(-1) * hidden).to(hidden.dtype))
    return record("mx_hidden", quantize_activations(hidden, choices) if choices.quantize_hidden else hidden)


def expert_output(hidden: Tensor, quantized: dict, groups: Groups, record=keep) -> Tensor:
    """W2q hidden per routed pair. [..., n, m] -> [..., n, l]."""
    output = expert_linear(hidden.flatten(0, -2), quantized["w2"], groups, hidden.dtype)
    return record("expert_output", output.unflatten(0, hidden.shape[:-1]))


def moe_combine(output: Tensor, weights: Tensor, choices, record=keep) -> Tensor:
    """Sum over the chosen experts of weight x output (report eq. 11). [..., n, l], [..., n] -> [..., l]."""
    wide_output = output.to(weights.dtype)
    if choices.routing_weight == "after_down":
        wide_output = weights.unsqueeze(-1) * wide_output
    return record("moe_combine", wide_output.sum(-2).to(output.dtype))


def latent_norm(u: Tensor, params: dict, config, record=keep) -> Tensor:
    """RMSNorm of the combined latent (report section 2.3.1). [..., l]."""
    return record("latent_norm", rms_norm(u, params[MOE + "routed_expert_norm.weight"], config.rms_norm_eps))


def shared_experts(x: Tensor, params: dict, config, record=keep) -> Tensor:
    """The S shared experts as one wide SiTU-GLU MLP. [..., d] -> [..., d]."""
    return _mlp(x, params, MOE + "shared_experts.", "shared_experts", config, record)


def dense_mlp(x: Tensor, params: dict, config, record=keep) -> Tensor:
    """The MLP of layout eagle3, unquantised. [..., d] -> [..., d]."""
    return _mlp(x, params, "mlp.", "dense_mlp", config, record)


def _mlp(x: Tensor, params: dict, prefix: str, stage: str, config, record) -> Tensor:
    gate = record(stage + ".gate", linear(x, params[prefix + "gate_proj.weight"]))
    up = record(stage + ".up", linear(x, params[prefix + "up_proj.weight"]))
    hidden = situ_glu(gate, up, config.activation_situ_beta, config.activation_situ_linear_beta)
    return record(stage, linear(record(stage + ".hidden", hidden), params[prefix + "down_proj.weight"]))


def moe(x, params, config, choices, quantized=None, experts=None, record=keep) -> Tensor:
    """What the sparse block adds to the residual: shared experts plus the projected routed sum, wide. [..., d].

    ``quantized``: the result of ``quantize_experts``, made here when absent. ``experts`` [..., n] pins the routing.
    """
    quantized = quantized or quantize_experts(params, config, choices)
    scores = record("router_scores", router_scores(x, params[MOE + "gate.weight"]))
    weights, experts = route(scores, params[MOE + "gate.e_score_correction_bias"], config, choices, experts)
    weights = record("route", weights)
    record("experts", experts)
    groups = group_by_expert(experts, config.num_experts)
    zq = mx_input(latent_down(x, params, record), choices, record)
    hidden = expert_hidden(zq, quantized, groups, config, record)
    output = expert_output(mx_hidden(hidden, weights, choices, record), quantized, groups, record)
    latent = latent_norm(moe_combine(output, weights, choices, record), params, config, record)
    routed = linear(latent, params[MOE + "routed_expert_up_proj.weight"], wide(x.dtype))
    return shared_experts(x, params, config, record) + routed
