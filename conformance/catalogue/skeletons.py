"""The adapters that ``conform new-adapter`` writes: they run at once, and their comments say how to go on."""

import textwrap

from ..protocol.keys import KEYS

ALREADY_THERE = ("name", "version", "url", "formats")

TORCH = '''\
"""My implementation, for the conformance suite. Try it: conform run {path}:adapter

It offers the LK loss to begin with. Replace the body of `my_lk_loss` by a call of your own kernel, then add methods.
"""

import torch

from draftconf.torch_helper import TorchAdapter, stage


def my_lk_loss(draft_logits, target_logits):
    """-log sum min(p, q) of each slot. [..., V], [..., V] -> [...]"""
    draft, target = draft_logits.log_softmax(-1), target_logits.log_softmax(-1)
    return -torch.minimum(draft, target).logsumexp(-1)


class Adapter(TorchAdapter):
    name = "mine"  # shown in the report, with version and url
    version = ""
    url = ""

    # What you store in; sums are in float32 unless you say otherwise. The bounds follow from this, and from nothing
    # else: there is no tolerance to set. Further keys: accumulate, router, logits, attention_output.
    formats = {{"storage": "float32"}}

    # What else describe() may say, with what holds where it is left out:
{keys}

    # device = "cuda"

    # A method for each stage that you offer: its name and inputs are those of `conform stages lk_loss`. Tensors come
    # in, in the storage type; gradients are taken by autograd, save those of the names in `frozen`.
    @stage(frozen=("target_logits",))
    def lk_loss(self, t, forced):
        return {{"loss": my_lk_loss(t["draft_logits"], t["target_logits"])}}

    # @stage
    # def situ_glu(self, t, forced):
    #     return {{"y": my_situ_glu(t["gate"], t["up"])}}

    # @stage(frozen=("gate.e_score_correction_bias",))
    # def route(self, t, forced):
    #     weights, experts = my_router(t["x"], t["gate.weight"], t["gate.e_score_correction_bias"])
    #     return {{"weights": weights}}, {{"experts": experts}}  # outputs, then decisions

    # Losses other than LK that your trainer offers, each a method of its own (docs/losses.md):
    # losses = {{"kl_loss": {{}}, "soft_ce_loss": {{"reduction": "supervised"}}}}

    # `unroll` runs the seven steps. Record what each stage hands on with draftconf.torch_helper.Trace, and a fault
    # is placed by step and stage; conformance/adapters/fast.py shows how.

    # A trainer whose draft layer is not K3's offers `pattern` in its place (docs/pattern.md):
    # pattern_declared = {{"loss": "lk", "step_weights": [0.8**k for k in range(7)], "denominator": "supervised"}}


adapter = Adapter()
'''

PLAIN = '''\
"""My implementation, for the conformance suite. Try it: conform run {path}:adapter

Plain NumPy arrays in and out: wrap whatever computes, in any language. It offers the LK loss to begin with.
"""

import numpy as np


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def log_sum_exp(x):
    top = np.maximum(x.max(-1, keepdims=True), -1e30)  # of nothing but -inf too
    return top + np.log(np.exp(x - top).sum(-1, keepdims=True))


class Adapter:
    protocol = 1

    def describe(self):
        # What you store in; sums are in float32 unless you say otherwise. The bounds follow from this, and from nothing
        # else: there is no tolerance to set. Further keys, with what holds where they are left out:
{keys}
        return {{"name": "mine", "version": "", "url": "", "formats": {{"storage": "float32"}}}}

    # A method for each stage that you offer: its name, inputs and outputs are those of `conform stages lk_loss`.
    # Inputs are read-only. `cotangents` maps outputs to arrays where gradients are wanted.
    def lk_loss(self, inputs, *, cotangents=None, forced=None):
        with np.errstate(divide="ignore"):
            draft, target = log_softmax(inputs["draft_logits"]), log_softmax(inputs["target_logits"])
            loss = -log_sum_exp(np.minimum(draft, target))  # [..., 1]
            below = draft < target
            if not cotangents:
                return {{"loss": loss[..., 0]}}
            # d loss / d logit = -(q / alpha) (below - mass of q below), in logs: q may vanish where 1 / alpha is huge.
            mass = log_sum_exp(np.where(below, draft, -np.inf))
            gradient = np.exp(draft + loss + mass) - np.exp(np.where(below, draft + loss, -np.inf))
        gradient *= cotangents["loss"][..., None]
        # Outputs, gradients by input, decisions.
        return {{"loss": loss[..., 0]}}, {{"draft_logits": gradient}}, {{"below": below}}


adapter = Adapter()
'''


def skeleton(path: str, plain: bool) -> str:
    """The text of an adapter that is to be written to ``path``."""
    if plain:
        return PLAIN.format(path=path, keys=commented("        ", "{!r}: {!r}", ALREADY_THERE))
    shown_below = ("losses", "pattern")
    return TORCH.format(path=path, keys=commented("    ", "{} = {!r}", (*ALREADY_THERE, *shown_below)))


def commented(indent: str, form: str, without: tuple[str, ...]) -> str:
    """The keys of ``describe()`` that may be left out, a comment each with its default and its meaning."""
    lines = []
    for key in KEYS:
        if key.name not in without:
            default = list(key.default) if isinstance(key.default, tuple) else key.default
            text = f"{form.format(key.name, default)}: {key.meaning.replace('`', '')}"
            lines += textwrap.wrap(
                text, 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", break_on_hyphens=False
            )
    return "\n".join(lines)
