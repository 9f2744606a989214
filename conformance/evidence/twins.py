"""Honest twins: other right ways to compute the step, none of which may raise an alarm.

Each is a change of ``fast`` that spec.md and the declared formats allow: another order or blocking of the sums, another
arrangement of the same algebra, more roundings than ``fast`` makes or fewer, another choice at a tie, less of a trace.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from draftconf.fast import attention, layer, loss, moe, unroll
from draftconf.fast.ops import wide

from .mutants.core import after, around, both, everywhere


@dataclass(frozen=True)
class Twin:
    """``change`` puts it in place; ``trace`` may thin the recorded trace of ``unroll``."""

    name: str
    change: Callable[[], AbstractContextManager]
    trace: Callable[[dict], dict] = dict
    policies: tuple[str, ...] = ("float64", "float32", "bfloat16")


def product(sum_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
    """Every ``linear`` with its sums made by ``sum_of(x, weight)``, both in the wide type."""

    def linear(original, x, weight, dtype=None):
        compute = wide(x.dtype)
        return sum_of(x.to(compute), weight.to(compute)).to(dtype or x.dtype)

    return lambda: everywhere("linear", linear)


def plain(x, weight):
    return x @ weight.transpose(-1, -2)


def reversed_order(x, weight):
    return plain(x.flip(-1), weight.flip(-1))


def permuted_order(x, weight):
    order = torch.from_numpy(np.random.default_rng(x.shape[-1]).permutation(x.shape[-1]))
    return plain(x[..., order], weight[..., order])


def blocks_of(size: int):
    """The sum of the partial sums of blocks, one after another."""

    def sum_of(x, weight):
        parts = [plain(a, b) for a, b in zip(x.split(size, -1), weight.split(size, -1), strict=True)]
        return sum(parts[1:], parts[0])

    return sum_of


def halves(x, weight):
    """Pairwise: both halves by themselves, then their sum."""
    if x.shape[-1] <= 8:
        return plain(x, weight)
    middle = x.shape[-1] // 2
    return halves(x[..., :middle], weight[..., :middle]) + halves(x[..., middle:], weight[..., middle:])


def wider_sums(x, weight):
    """Sums in float64, rounded once to the accumulation format."""
    return plain(x.double(), weight.double()).to(x.dtype)


def norm_by_rsqrt(original, x, weight, eps):
    y = x.to(wide(x.dtype))
    return (weight.to(y.dtype) * (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps))).to(x.dtype)


def norm_of_torch(original, x, weight, eps):
    compute = wide(x.dtype)
    return torch.nn.functional.rms_norm(x.to(compute), x.shape[-1:], weight.to(compute), eps).to(x.dtype)


def norm_scaled_first(original, x, weight, eps):
    """(w x) / rms in place of w (x / rms)."""
    y = x.to(wide(x.dtype))
    return (weight.to(y.dtype) * y / torch.sqrt(y.square().sum(-1, keepdim=True) / y.shape[-1] + eps)).to(x.dtype)


def glu_reassociated(original, gate, up, beta, linear_beta):
    g, u = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    caps = (beta * linear_beta) * (torch.tanh(g / beta) * torch.tanh(u / linear_beta))
    return (caps * torch.sigmoid(g)).to(gate.dtype)


def glu_by_exponentials(original, gate, up, beta, linear_beta):
    g, u = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    sigmoid = torch.exp(-torch.logaddexp(torch.zeros_like(g), -g))
    return (beta * torch.tanh(g / beta) * sigmoid * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def scaled_query(original, query, keys, values, documents=None):
    """The scale on the query before the product: its square root times what the function itself applies."""
    width = query.shape[-1]
    return original(query.to(wide(query.dtype)) * width**-0.5 * width**0.5, keys, values, documents)


def attention_by_parts(original, query, keys, values, documents=None):
    """The step-1 part by itself, the own keys merged through the log-sum-exp."""
    compute = wide(query.dtype)
    q, scale = query.to(compute), query.shape[-1] ** -0.5
    scores = torch.einsum("bthd,bshd->bths", q, keys[0].to(compute)) * scale
    hidden = ~attention.visible(query.shape[1], documents, query.device).unsqueeze(2)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)  # [B, T, H, 1]
    output = torch.einsum("bths,bshv->bthv", torch.exp(scores - lse), values[0].to(compute))
    for key, value in zip(list(keys)[1:], list(values)[1:], strict=True):
        own = (q * key.to(compute)).sum(-1, keepdim=True) * scale
        total = torch.logaddexp(lse, own)
        output = output * torch.exp(lse - total) + torch.exp(own - total) * value.to(compute)
        lse = total
    return output


def projection_stored(original, gated, params, residual, record):
    """The projection rounded to storage before the residual is added."""
    projected = attention.linear(gated, params["self_attn.o_proj.weight"])
    return record("attn_output", residual + projected)


def other_expert_order(original, scores, bias, config, choices, experts=None):
    weights, chosen = original(scores, bias, config, choices, experts)
    return (weights, chosen) if experts is not None else (weights.flip(-1), chosen.flip(-1))


def highest_id_at_ties(original, scores, bias, config, choices, experts=None):
    if experts is None:
        key = (scores.detach() + bias.detach()).flip(-1)
        ids = torch.argsort(key, dim=-1, descending=True, stable=True)[..., : config.num_experts_per_token]
        experts = scores.shape[-1] - 1 - ids
    return original(scores, bias, config, choices, experts)


def combine_one_by_one(original, output, weights, choices, record=lambda name, x: x):
    if choices.routing_weight != "after_down":
        return original(output, weights, choices, record)
    total = 0
    for n in reversed(range(output.shape[-2])):
        total = total + weights[..., n, None] * output[..., n, :].to(weights.dtype)
    return record("moe_combine", total.to(output.dtype))


def loss_with_theta(theta: float):
    """The gradient set's member that autograd would take: ``theta`` where q = p."""

    def lk_loss(original, draft_logits, target_logits, draft_to_target=None, reduced_target="restricted", **_):
        log_p = loss.target_log_probs(target_logits.detach(), draft_to_target, reduced_target)
        return _TiedLoss.apply(draft_logits, log_p, theta)

    return lambda: around(unroll, "lk_loss", lk_loss)


class _TiedLoss(torch.autograd.Function):
    """dloss/dQ_x = q_x sum(e) - e_x, e = theta q / alpha with ``tie`` as theta where q = p."""

    @staticmethod
    def forward(ctx, draft_logits, log_p, tie):
        log_q = torch.log_softmax(draft_logits.to(log_p.dtype), -1)
        log_alpha = torch.logsumexp(torch.minimum(log_p, log_q), -1, keepdim=True)
        theta = (log_q < log_p).to(log_q) + tie * (log_q == log_p).to(log_q)
        e = theta * torch.exp((log_q - log_alpha).clamp(max=0))
        ctx.save_for_backward(torch.exp(log_q) * e.sum(-1, keepdim=True) - e)
        ctx.dtype = draft_logits.dtype
        return -log_alpha.squeeze(-1)

    @staticmethod
    def backward(ctx, d_loss):
        return (d_loss.unsqueeze(-1) * ctx.saved_tensors[0]).to(ctx.dtype), None, None


def loss_in_chunks(original, draft_logits, target_logits, draft_to_target=None, reduced_target="restricted", **_):
    """log-sum-exp over vocabulary chunks, autograd through all of it."""
    if draft_to_target is not None:
        return original(draft_logits, target_logits, draft_to_target, reduced_target)

    def log_softmax(x):
        return x - torch.logsumexp(torch.stack([part.logsumexp(-1) for part in x.split(32, -1)], -1), -1, keepdim=True)

    draft, target = draft_logits.to(wide(draft_logits.dtype)), target_logits.to(wide(draft_logits.dtype)).detach()
    low = torch.minimum(log_softmax(target), log_softmax(draft))
    return -torch.logsumexp(torch.stack([part.logsumexp(-1) for part in low.split(32, -1)], -1), -1)


def gradients_stored_each_step():
    """Parameters in storage: every use's gradient is rounded to it, and so are the partial sums."""
    return around(unroll, "widen", lambda original, params: params)


def thinned(seed: int, share: float = 0.5):
    """A trace with some boundaries left out, values and cotangents alike."""

    def trace(full: dict) -> dict:
        rng = np.random.default_rng(seed)
        stages = sorted({key.removesuffix(".grad").partition("/")[2] for key in full})
        hidden = {stage for stage in stages if rng.random() < share}
        return {key: x for key, x in full.items() if key.removesuffix(".grad").partition("/")[2] not in hidden}

    return trace


def without_cotangents(full: dict) -> dict:
    return {key: x for key, x in full.items() if not key.endswith(".grad")}


def spec_stages_only(full: dict) -> dict:
    """Without the optional dotted boundaries."""
    return {key: x for key, x in full.items() if "." not in key.removesuffix(".grad")}


def exact_products_in_float64():
    """MX scales and codes computed from float64."""
    return after(moe, "quantize_activations", lambda y: y.double().to(y.dtype))


def head_in_blocks():
    """Logits a block of the vocabulary at a time."""

    def logits(original, normed, params, record=lambda name, x: x):
        weights = params["shared_head.head.weight"].split(16, 0)
        parts = [layer.linear(normed, weight, wide(normed.dtype)) for weight in weights]
        return record("logits", torch.cat(parts, -1))

    return both(around(layer, "logits", logits), around(unroll, "logits", logits))


TWINS = [
    Twin("as it is", nullcontext),
    Twin("sums in reverse", product(reversed_order)),
    Twin("sums permuted", product(permuted_order)),
    Twin("sums in blocks of 16", product(blocks_of(16))),
    Twin("sums in blocks of 4", product(blocks_of(4))),
    Twin("sums pairwise", product(halves)),
    Twin("sums in float64", product(wider_sums)),
    Twin("norm by rsqrt", lambda: everywhere("rms_norm", norm_by_rsqrt)),
    Twin("norm of torch", lambda: everywhere("rms_norm", norm_of_torch)),
    Twin("norm, gain first", lambda: everywhere("rms_norm", norm_scaled_first)),
    Twin("SiTU reassociated", lambda: everywhere("situ_glu", glu_reassociated)),
    Twin("SiTU by exponentials", lambda: everywhere("situ_glu", glu_by_exponentials)),
    Twin("attention, query scaled", lambda: around(attention, "attention", scaled_query)),
    Twin("attention by parts", lambda: around(attention, "attention", attention_by_parts)),
    Twin("projection stored", lambda: around(layer, "attn_output", projection_stored)),
    Twin("experts in another order", lambda: around(moe, "route", other_expert_order)),
    Twin("highest id at ties", lambda: around(moe, "route", highest_id_at_ties)),
    Twin("experts combined one by one", lambda: around(moe, "moe_combine", combine_one_by_one)),
    Twin("theta 1 at ties", loss_with_theta(1.0)),
    Twin("theta 1/2 at ties", loss_with_theta(0.5)),
    Twin("loss in chunks", lambda: around(unroll, "lk_loss", loss_in_chunks)),
    Twin("gradients stored each step", gradients_stored_each_step),
    Twin("MX from float64", exact_products_in_float64),
    Twin("head in blocks", head_in_blocks, policies=("float64", "float32")),
    Twin("half of the trace", nullcontext, thinned(1)),
    Twin("other half of the trace", nullcontext, thinned(2)),
    Twin("a tenth of the trace", nullcontext, thinned(3, 0.9)),
    Twin("no cotangents", nullcontext, without_cotangents),
    Twin("no optional boundaries", nullcontext, spec_stages_only),
]


def by_policy(policy: str) -> Iterator[Twin]:
    return (twin for twin in TWINS if policy in twin.policies)
