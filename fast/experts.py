"""The routed experts of all unrolled steps: weights quantised once per optimizer step, one weight gradient an expert.

Each expert works on its own rows, taken from the tokens sorted by expert, so that nothing is padded and no tensor of a
whole stack is indexed under autograd. The latent is quantised once per token, before it is handed to its experts. What
backward needs of a step is kept by expert, and the weight gradient of all steps is one product an expert, written into
memory that is there already.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from .deferred import Uses
from .moe import MOE, quantize_activations
from .mx import fake_quantize
from .ops import wide
from .pointwise import situ, situ_gradient

WHICH = ("w1", "w3", "w2")


class Quantized(NamedTuple):
    """MXFP4 values of the experts' weights in their storage type; gate rows before up rows."""

    gate_up: Tensor  # [E, 2m, l]
    down: Tensor  # [E, l, m]


def expert_parameters(params: dict, config) -> list[Tensor]:
    """w1, w3, w2 of every expert in turn. 3E tensors."""
    return [params[f"{MOE}experts.{e}.{which}.weight"] for e in range(config.num_experts) for which in WHICH]


class ExpertCache:
    """Quantised expert weights, kept until a parameter changes.

    A parameter has changed when it is another tensor or its version counter has moved, as every in-place operation
    under the optimizer moves it; after a write through ``.data`` call ``clear``. With ``reuse_gradients`` the weight
    gradients of one backward overwrite those of the one before, unless a parameter's ``grad`` still holds them: for a
    training loop that reads gradients only from ``grad``.
    """

    def __init__(self, reuse_gradients: bool = False):
        self.reuse_gradients, self.quantizations = reuse_gradients, 0
        self.clear()

    def clear(self) -> None:
        self._seen, self._settings, self._quantized, self._gradients = (), None, None, None

    def get(self, parameters: list[Tensor], choices) -> Quantized:
        """Quantised values of ``expert_parameters``."""
        settings = choices.mx_scale_rule, choices.quantize_source
        fresh = len(self._seen) == len(parameters) and settings == self._settings
        pairs = zip(self._seen, parameters, strict=False)
        if not fresh or any(seen() is not p or version != p._version for (seen, version), p in pairs):
            self._quantized = quantize(parameters, choices, self._quantized)
            self._seen = tuple((weakref.ref(p), p._version) for p in parameters)
            self._settings, self.quantizations = settings, self.quantizations + 1
        return self._quantized

    def gradients(self, parameters: list[Tensor], like: Quantized) -> Quantized:
        """Memory for the weight gradients."""
        if not self.reuse_gradients:
            return Quantized(*map(torch.empty_like, like))
        mine = {x.untyped_storage().data_ptr() for x in self._gradients or ()}
        held = any(p.grad is not None and p.grad.untyped_storage().data_ptr() in mine for p in parameters)
        if held or self._gradients is None or self._gradients.down.shape != like.down.shape:
            fresh = Quantized(*map(torch.empty_like, like))
            self._gradients = self._gradients if held else fresh
            return fresh
        return self._gradients


@torch.no_grad()
def quantize(parameters: list[Tensor], choices, out: Quantized | None = None) -> Quantized:
    """MXFP4 values of w1, w3, w2 of every expert, into ``out`` where that fits."""
    (m, latent), count = parameters[0].shape, len(parameters) // 3
    if out is None or out.gate_up.shape != (count, 2 * m, latent) or out.down.dtype != parameters[0].dtype:
        new = parameters[0].new_empty
        out = Quantized(new(count, 2 * m, latent), new(count, latent, m))
    for e in range(count):
        places = out.gate_up[e, :m], out.gate_up[e, m:], out.down[e]
        for place, p in zip(places, parameters[3 * e : 3 * e + 3], strict=True):
            place.copy_(fake_quantize(p.detach(), "mxfp4", choices.mx_scale_rule, choices.quantize_source))
    return out


class Rows(NamedTuple):
    """Routed pairs sorted by expert: the token of each [P], its place among the token's n, and the pairs by expert."""

    token: Tensor
    place: Tensor
    slices: tuple[slice, ...]

    @property
    def used(self) -> list[tuple[int, slice]]:
        return [(e, rows) for e, rows in enumerate(self.slices) if rows.stop > rows.start]


def sort_by_expert(experts: Tensor, num_experts: int) -> Rows:
    """experts int [N, n] -> the P = N n pairs sorted by expert, tokens ascending within one."""
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0).tolist()
    slices = tuple(slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))
    width = experts.shape[-1]
    return Rows(order // width, order % width, slices)


class Experts:
    """The experts of one unroll, quantised once, and the token on which every step's use of them depends.

    With ``deferred`` False each step adds its own products to the weight gradients, in storage, and keeps nothing.
    """

    def __init__(self, params: dict, config, choices, cache: ExpertCache | None = None, deferred: bool = True):
        parameters = expert_parameters(params, config)
        self.work = _Work(parameters, config, choices, ExpertCache() if cache is None else cache, Uses(deferred))
        self.token = _ExpertGradients.apply(self.work, *parameters)

    def combine(self, zq: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """sum over the chosen experts of weight x expert(zq) (report eq. 11 and 12), in the type of zq.

        zq [..., l], on the MXFP8 grid; weights [..., n] wide; experts int [..., n] -> [..., l].
        """
        rows = sort_by_expert(experts.flatten(0, -2), self.work.config.num_experts)
        flat = zq.flatten(0, -2), weights.flatten(0, -2)
        return _Experts.apply(*flat, self.token, self.work, rows).unflatten(0, zq.shape[:-1])


class _Work:
    """What the steps of one unroll share. It does not hold the token, which would make a cycle of the graph."""

    def __init__(self, parameters: list[Tensor], config, choices, cache: ExpertCache, uses: Uses):
        self.config, self.choices, self.uses = config, choices, uses
        self.weights, self.gradients = cache.get(parameters, choices), None
        self.version = self.weights.down._version
        self.allocate = lambda: cache.gradients(parameters, self.weights)

    def check_version(self) -> None:
        """Raises RuntimeError where the quantised weights were made anew between a forward and its backward."""
        if self.weights.down._version != self.version:
            raise RuntimeError("the experts' weights changed between the forward pass and its backward")

    def add_gradients(self, kept: list) -> None:
        """Of every expert, one product over its rows of the uses ``kept`` a weight; added to what is there."""
        first, before = self.gradients is None, self.choices.routing_weight == "before_down"
        self.gradients = grads = self.allocate() if first else self.gradients
        for e in range(len(grads.down)):
            parts = [_factors(e, *use, before) for use in kept if use[0].slices[e].stop > use[0].slices[e].start]
            if not parts and first:
                grads.gate_up[e].zero_(), grads.down[e].zero_()
            if parts:
                x, d_gate_up, hidden, d_output = map(_joined, zip(*parts, strict=True))
                _product(grads.gate_up[e], d_gate_up, x, first)
                _product(grads.down[e], d_output, hidden, first)

    @property
    def betas(self) -> tuple[float, float]:
        return self.config.activation_situ_beta, self.config.activation_situ_linear_beta

    def hidden(self, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden of one expert's rows before and after its quantisation, in storage. gate_up [c, 2m] -> [c, m]."""
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = situ(gate, up, self.betas, torch.empty_like(gate, memory_format=torch.contiguous_format))
        if self.choices.routing_weight == "before_down":
            hidden = (hidden * weight).to(gate_up.dtype)
        return hidden, quantize_activations(hidden, self.choices) if self.choices.quantize_hidden else hidden

    def through_quantisation(self, hidden: Tensor, d: Tensor) -> Tensor:
        """Straight through, or with ``ste`` clipped zero where the value was cut off."""
        if self.choices.ste == "identity" or not self.choices.quantize_hidden:
            return d
        return _clipped(hidden, d, lambda x: quantize_activations(x, self.choices))


def _clipped(x: Tensor, d: Tensor, quantise) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(quantise(x), x, d.to(x.dtype))[0].to(d.dtype)


class _Experts(torch.autograd.Function):
    """u = sum_i w_i W2 h_i with h_i = MXFP8(SiTU-GLU(W1 z, W3 z)), expert by expert on its own rows.

    d_h_i = w_i g_i and d_w_i = g_i . h_i with g_i = W2^T d_u, so that expert outputs are not kept. With ``before_down``
    h_i is the weighted hidden: d_w_i comes from the hidden before the weight, and g_i is not weighted.
    """

    @staticmethod
    def forward(ctx, zq, weights, token, of, rows):
        total = zq.new_zeros(zq.shape, dtype=wide(zq.dtype))
        sorted_weights = weights[rows.token, rows.place].unsqueeze(-1)  # [P, 1]
        width = of.weights.gate_up.shape[1]
        gate_up = zq.new_empty(len(rows.token), width)
        hidden = zq.new_empty(len(rows.token), width // 2)
        before = of.choices.routing_weight == "before_down"
        for e, at in rows.used:
            torch.mm(zq[rows.token[at]], of.weights.gate_up[e].t(), out=gate_up[at])
            hidden[at] = of.hidden(gate_up[at], sorted_weights[at])[1]
            output = (hidden[at] @ of.weights.down[e].t()).to(total.dtype)  # [c, l]
            total.index_add_(0, rows.token[at], output if before else output * sorted_weights[at])
        ctx.save_for_backward(zq, sorted_weights, gate_up, hidden)
        ctx.of, ctx.rows, ctx.index, ctx.shape = of, rows, of.uses.next_index(), weights.shape
        return total.to(zq.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_u):
        zq, sorted_weights, gate_up, hidden = ctx.saved_tensors
        of, rows = ctx.of, ctx.rows
        of.check_version()
        d_zq = zq.new_zeros(zq.shape, dtype=wide(zq.dtype))
        d_weight, d_gate_up = torch.zeros_like(sorted_weights), torch.empty_like(gate_up)
        for e, at in rows.used:
            flow = d_u[rows.token[at]] @ of.weights.down[e]  # [c, m]
            pieces = gate_up[at], hidden[at], sorted_weights[at], flow.to(d_zq.dtype)
            d_weight[at] = _through_hidden(of, *pieces, d_gate_up[at])
            d_zq.index_add_(0, rows.token[at], (d_gate_up[at] @ of.weights.gate_up[e]).to(d_zq.dtype))
        if ctx.needs_input_grad[2]:
            use = rows, zq, d_gate_up, hidden, d_u, sorted_weights
            of.uses.kept[ctx.index] = use
            if not of.uses.deferred:
                of.add_gradients(of.uses.take())
        d_weights = d_weight.new_zeros(ctx.shape)
        d_weights[rows.token, rows.place] = d_weight.squeeze(-1)
        return d_zq.to(zq.dtype), d_weights, d_u.new_zeros(()), None, None


def _through_hidden(of, gate_up, hidden, weight, flow, d_gate_up) -> Tensor:
    """From flow = W2^T d_u [c, m], wide, to d_gate_up [c, 2m], written in place; returns d_weight [c, 1]."""
    half, before = gate_up.chunk(2, dim=-1), of.choices.routing_weight == "before_down"
    if before:
        source = situ(*half, of.betas, torch.empty_like(hidden)).to(flow.dtype)  # the hidden before its weight
        d = of.through_quantisation((source * weight).to(gate_up.dtype), flow)
        d_weight = (d * source).sum(-1, keepdim=True)
        d = d * weight
    else:
        d_weight = (flow * hidden).sum(-1, keepdim=True)
        d = flow.mul_(weight)
        if of.choices.ste == "clipped" and of.choices.quantize_hidden:
            d = of.through_quantisation(of.hidden(gate_up, weight)[0], d)
    situ_gradient(*half, d, of.betas, *d_gate_up.chunk(2, dim=-1))
    return d_weight


class _ExpertGradients(torch.autograd.Function):
    """Parameters -> token []. Backward: what the uses left behind, as weight gradients."""

    @staticmethod
    def forward(ctx, of, *parameters):
        ctx.of, ctx.parameters = of, parameters
        return parameters[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_token):
        kept = ctx.of.uses.take()
        if kept or ctx.of.gradients is None:
            ctx.of.add_gradients(kept)
        grads, ctx.of.gradients = ctx.of.gradients, None
        return None, *_by_parameter(ctx.parameters, grads, ctx.of.choices)


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _product(out: Tensor, d_y: Tensor, x: Tensor, first: bool) -> None:
    """out = d_y^T x, or out += d_y^T x."""
    if first:
        torch.mm(d_y.t(), x, out=out)
    else:
        torch.addmm(out, d_y.t(), x, out=out)


def _factors(e: int, rows: Rows, zq, d_gate_up, hidden, d_u, sorted_weights, before: bool) -> tuple[Tensor, ...]:
    """One step's rows of expert e: the two inputs and the two cotangents of its products, in storage."""
    at, token = rows.slices[e], rows.token[rows.slices[e]]
    d_output = d_u[token]
    if not before:
        d_output = (d_output * sorted_weights[at]).to(d_u.dtype)
    return zq[token], d_gate_up[at], hidden[at], d_output


def _by_parameter(parameters: tuple[Tensor, ...], grads: Quantized, choices) -> list[Tensor]:
    """Views of the gradients in the order of the parameters."""
    m, views = grads.down.shape[-1], []
    for e in range(len(grads.down)):
        views += [grads.gate_up[e, :m], grads.gate_up[e, m:], grads.down[e]]
    if choices.ste == "clipped":
        settings = "mxfp4", choices.mx_scale_rule, choices.quantize_source, "clipped"
        pairs = zip(parameters, views, strict=True)
        views = [_clipped(p, d, lambda x: fake_quantize(x, *settings)) for p, d in pairs]
    return views
