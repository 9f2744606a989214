"""Wrong heads and losses: what the logits are, -log of the overlap, its gradient."""

import torch

from draftconf.fast import layer, loss, ops, unroll

from .core import STEPS, area, around, backward, both, with_gradient_of

MUTANTS: list = []
mutant = area("loss", MUTANTS)
LOSS = "loss = -log sum min(p, q) (report eq. 16)"
GRADIENT = "dloss/dQ = -(q / alpha)(theta - s) (spec.md 5)"


def slot_loss(change):
    """``change(log_q, log_p, draft, target)`` -> loss of every position, in the unroll and as a method."""

    def wrapper(original, draft, target, ids=None, reduced="restricted", **_):
        log_p = torch.log_softmax(target.detach(), -1)
        log_p = log_p if ids is None else log_p[..., ids]
        return change(torch.log_softmax(draft, -1), log_p, draft, target.detach())

    return both(around(unroll, "lk_loss", wrapper), around(loss, "lk_loss", wrapper))


def right(log_q, log_p):
    return -torch.logsumexp(torch.minimum(log_p, log_q), -1)


class _Gradient(torch.autograd.Function):
    """The loss with a gradient made by ``change(q, p, theta, alpha, s)`` from probabilities."""

    @staticmethod
    def forward(ctx, draft, log_p, change):
        log_q = torch.log_softmax(draft, -1)
        value = right(log_q, log_p)
        ctx.save_for_backward(log_q, log_p, value)
        ctx.change = change
        return value

    @staticmethod
    def backward(ctx, d):
        log_q, log_p, value = ctx.saved_tensors
        q, p, theta, alpha = log_q.exp(), log_p.exp(), (log_q < log_p).to(log_q.dtype), (-value).exp().unsqueeze(-1)
        s = (theta * q).sum(-1, keepdim=True)
        return d.unsqueeze(-1) * ctx.change(q, p, theta, alpha, s), None, None


def gradient(change):
    return slot_loss(lambda log_q, log_p, draft, target: _Gradient.apply(draft, log_p, change))


# -- head --------------------------------------------------------------------------------------------------------------


@mutant("logits", "forward", 1, "the head reads head_norm", "T19: SpecForge #879; ik_llama.cpp #2322")
def head_reads_the_raw_feature():
    def wrapper(original, params, inputs, *args, **kwargs):
        last = []
        normed = after_norm(last)
        with normed, around(unroll, "logits", lambda o, x, *rest: o(last[-1], *rest)):
            return original(params, inputs, *args, **kwargs)

    def after_norm(last):
        return around(unroll, "head_norm", lambda o, f, *rest: last.append(f) or o(f, *rest))

    return around(unroll, "unroll", wrapper)


@mutant("logits", "forward", 1, "logits = head x, no scale, no cap", "Gemma caps at 30")
def logits_capped():
    return _logits(lambda y: 30 * torch.tanh(y / 30))


@mutant("logits", "forward", 1, "temperature 1")
def logits_over_a_temperature():
    return _logits(lambda y: y / 0.8)


def _logits(change):
    def wrapper(original, normed, params, record=ops.keep):
        return record("logits", change(original(normed, params)))

    return both(around(unroll, "logits", wrapper), around(layer, "logits", wrapper))


@mutant("logits", "forward", 1, "the head is not tied to the embedding", "F07: Automodel #2601")
def head_tied_to_the_embedding():
    def wrapper(original, normed, params, record=ops.keep):
        return original(normed, params | {"shared_head.head.weight": params["embed_tokens.weight"]}, record)

    return around(unroll, "logits", wrapper)


@mutant("logits", "forward", 1, "row v of the head is token v", "F08: TorchSpec #184")
def head_rows_permuted():
    return _logits(lambda y: y.roll(1, -1))


@mutant("logits", "forward", 1, "logits are float32 where declared", "L05: speculators #788", policy="bfloat16")
def logits_in_bfloat16():
    return _logits(lambda y: y.bfloat16().float())


@mutant("logits", "backward", STEPS, "d normed = d logits W through the frozen head too", "F01: speculators #593")
def no_gradient_through_the_frozen_head():
    def wrapper(original, normed, params, record=ops.keep):
        return original(normed.detach(), params, record)

    return around(unroll, "logits", wrapper)


@mutant("head_norm", "backward", STEPS, "f' gets the head's gradient at every step")
def head_norm_input_detached():
    return around(unroll, "head_norm", lambda o, f, *args: o(f.detach(), *args))


# -- value -------------------------------------------------------------------------------------------------------------


@mutant("lk_loss", "forward", 1, LOSS, "L10: aprender #2153; EAGLE trains on it")
def kl_divergence():
    return slot_loss(lambda log_q, log_p, *_: (log_p.exp() * (log_p - log_q)).sum(-1))


@mutant("lk_loss", "forward", 1, LOSS, "L10: ProDA #20, #43")
def reversed_kl_divergence():
    return slot_loss(lambda log_q, log_p, *_: (log_q.exp() * (log_q - log_p)).sum(-1))


@mutant("lk_loss", "forward", 1, LOSS, "L11: SpecForge #823")
def cross_entropy_with_the_target():
    return slot_loss(lambda log_q, log_p, *_: -(log_p.exp() * log_q).sum(-1))


@mutant("lk_loss", "forward", 1, LOSS, "L11: SpecForge #823")
def target_one_hot():
    def change(log_q, log_p, *_):
        return -torch.gather(log_q, -1, log_p.argmax(-1, keepdim=True))[..., 0]

    return slot_loss(change)


@mutant("lk_loss", "forward", 1, LOSS, "own; total variation")
def one_minus_the_overlap():
    return slot_loss(lambda log_q, log_p, *_: 1 - torch.minimum(log_p, log_q).exp().sum(-1))


@mutant("lk_loss", "forward", 1, "no cross-entropy term (report 4.1.4)", "L07: SpecForge 4e9b1e4a; Automodel #3032")
def hybrid_with_a_little_cross_entropy():
    return slot_loss(lambda log_q, log_p, *_: right(log_q, log_p) - 0.001 * (log_p.exp() * log_q).sum(-1))


@mutant("lk_loss", "forward", 1, "min, not product", "S04: mlx-swift-lm #459")
def overlap_of_two_independent_draws():
    return slot_loss(lambda log_q, log_p, *_: -torch.logsumexp(log_p + log_q, -1))


@mutant("lk_loss", "forward", 1, "finite for all finite logits", "L02: SpecForge; pytorch #68425")
def overlap_from_probabilities():
    return slot_loss(lambda log_q, log_p, *_: -torch.minimum(log_p.exp(), log_q.exp()).sum(-1).log())


@mutant("lk_loss", "forward", None, "the worst slots have the largest loss", "L04: Automodel #3032 (137064a44)")
def no_overlap_gives_no_loss():
    def change(log_q, log_p, *_):
        alpha = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        return torch.where(alpha > 1e-30, right(log_q, log_p), 0.0)

    return slot_loss(change)


@mutant("lk_loss", "forward", None, LOSS, "L02: SpecForge lk_loss")
def overlap_clamped():
    return slot_loss(lambda log_q, log_p, *_: -torch.minimum(log_p, log_q).exp().sum(-1).clamp(min=1e-6).log())


@mutant("lk_loss", "forward", 1, LOSS, "L02")
def epsilon_inside_the_log():
    return slot_loss(lambda log_q, log_p, *_: -(torch.minimum(log_p, log_q).exp().sum(-1) + 1e-5).log())


@mutant("lk_loss", "forward", None, LOSS, "L02: alpha + 1e-8", policy="float64")
def small_epsilon_inside_the_log():
    return slot_loss(lambda log_q, log_p, *_: -(torch.minimum(log_p, log_q).exp().sum(-1) + 1e-8).log())


@mutant("lk_loss", "forward", 1, "softmax in float32 or better", "L05: speculators #788 (3251ed02)")
def softmax_of_the_loss_in_bfloat16():
    def change(log_q, log_p, draft, target):
        q = torch.softmax(draft.bfloat16(), -1)
        return -torch.minimum(log_p.exp(), q.to(draft.dtype)).sum(-1).clamp(min=1e-30).log()

    return slot_loss(change)


@mutant("lk_loss", "forward", 1, "the target's logits keep their format", "L05: speculators #951")
def target_rounded_to_bfloat16():
    def change(log_q, log_p, draft, target):
        return right(log_q, torch.log_softmax(target.bfloat16().to(draft.dtype), -1))

    return slot_loss(change)


@mutant("lk_loss", "forward", 1, "an odd vocabulary has no more tokens than it has", "own; vocabulary padded to 128")
def padded_vocabulary_in_the_normaliser():
    def change(log_q, log_p, draft, target):
        padded = torch.cat([draft, torch.zeros_like(draft[..., :31])], -1)
        return right(torch.log_softmax(padded, -1)[..., : draft.shape[-1]], log_p)

    return slot_loss(change)


@mutant("lk_loss", "forward", 1, "the vocabulary's last block counts", "ragged last blocks: aiter #2900")
def last_block_of_the_vocabulary_dropped():
    def change(log_q, log_p, draft, target):
        return right(log_q[..., :96], log_p[..., :96])

    return slot_loss(change)


@mutant("lk_loss", "forward", 1, "temperature 1 on both sides")
def target_temperature_differs():
    return slot_loss(lambda log_q, log_p, draft, target: right(log_q, torch.log_softmax(target / 0.9, -1)))


@mutant("lk_loss", "forward", None, "a constant on all logits changes nothing", "A11", methods=("lk_loss",))
def normaliser_without_its_maximum():
    def change(log_q, log_p, draft, target):
        return right(draft - draft.exp().sum(-1, keepdim=True).log(), log_p)

    return slot_loss(change)


# -- gradient ----------------------------------------------------------------------------------------------------------


@mutant("lk_loss", "backward", STEPS, GRADIENT)
def sum_over_the_vocabulary_missing():
    return gradient(lambda q, p, theta, alpha, s: -(q / alpha.clamp(min=1e-30)) * theta)


@mutant("lk_loss", "backward", STEPS, GRADIENT)
def gradient_of_the_overlap_not_of_its_log():
    return gradient(lambda q, p, theta, alpha, s: -q * (theta - s))


@mutant("lk_loss", "backward", STEPS, GRADIENT)
def mask_the_other_way_round():
    return gradient(lambda q, p, theta, alpha, s: (q / alpha.clamp(min=1e-30)) * ((1 - theta) - (1 - s)) * -1)


@mutant("lk_loss", "backward", STEPS, GRADIENT, "L10: KL's gradient under an LK value")
def gradient_of_the_kl_divergence():
    return gradient(lambda q, p, theta, alpha, s: q - p)


@mutant("lk_loss", "backward", None, "finite for all finite logits", "L02: SpecForge; pytorch #52248, #108618")
def gradient_by_division_through_the_overlap():
    return gradient(lambda q, p, theta, alpha, s: -(q / alpha) * (theta - s))


@mutant("lk_loss", "backward", None, "q - s in float32 or better", "L05: speculators #788 (23 % gradient error)")
def mask_taken_from_bfloat16_probabilities():
    def change(q, p, theta, alpha, s):
        theta = (q.bfloat16() < p.bfloat16()).to(q.dtype)
        return -(q / alpha.clamp(min=1e-30)) * (theta - (theta * q).sum(-1, keepdim=True))

    return gradient(change)


@mutant("lk_loss", "backward", None, "a zero overlap has a gradient", "L02; L04: Automodel #3032")
def gradient_dropped_where_the_overlap_vanishes():
    def change(log_q, log_p, draft, target):
        value = right(log_q, log_p)
        return torch.where(value < 20, value, value.detach())

    return slot_loss(change)


@mutant("lk_loss", "backward", None, "at q = p theta lies in [0, 1]", "spec.md 5", methods=("lk_loss",))
def ties_counted_twice():
    def change(q, p, theta, alpha, s):
        theta = theta + 2.0 * (q == p)
        return -(q / alpha.clamp(min=1e-30)) * (theta - (theta * q).sum(-1, keepdim=True))

    return gradient(change)


@mutant(
    "lk_loss",
    "backward",
    None,
    "at q = p theta is one number in the term and in its sum",
    "spec.md 5",
    methods=("lk_loss",),
)
def ties_left_out_of_the_sum():
    def change(q, p, theta, alpha, s):
        return -(q / alpha.clamp(min=1e-30)) * (torch.where(q == p, 1.0, theta) - s)

    return gradient(change)


@mutant("lk_loss", "decision", None, "below: q < p", methods=("lk_loss",))
def below_the_other_way_round():
    return around(loss, "below", lambda o, *args: ~o(*args))


@mutant(
    "lk_loss",
    "decision",
    None,
    "below: q < p in the accumulation format",
    "L05: speculators #788",
    methods=("lk_loss",),
)
def below_from_bfloat16():
    def wrapper(original, draft, target, *args):
        return torch.softmax(draft, -1).bfloat16() < torch.softmax(target, -1).bfloat16()

    return around(loss, "below", wrapper)


@mutant(
    "lk_loss", "frozen", None, "the target gets no gradient", "F02: Model-Optimizer #692; L07", methods=("lk_loss",)
)
def gradient_reaches_the_target():
    from ...adapters.fast import FastAdapter

    def wrapper(original, self, inputs, **kwargs):
        outputs, grads, *rest = original(self, inputs, **kwargs)
        return outputs, grads | {"target_logits": inputs["target_logits"]}, *rest

    return around(FastAdapter, "lk_loss", wrapper)


@mutant("logits", "backward", STEPS, "every slot's gradient is its own", "L14: SpecForge #185")
def logits_buffer_overwritten():
    def wrapper(original, normed, params, record=ops.keep):
        y = original(normed, params)
        return record("logits", with_gradient_of(y, backward(y, lambda d: d.roll(1, 1))))

    return around(unroll, "logits", wrapper)
