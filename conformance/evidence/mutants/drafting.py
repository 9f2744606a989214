"""Wrong sequential drafting: the cache, the feature recycled, the given tokens."""

import torch

from draftconf.fast import unroll

from .core import area, around, patch

MUTANTS: list = []
mutant = area("drafting", MUTANTS)
SERIAL = "drafting equals the unroll's slot of the anchor (spec.md 8)"
DRAFT = {"methods": ("draft_sequence",), "policy": "float64"}  # in which seven steps can be decided


def cached(change):
    """``change(query, keys, values)`` before the cached attention."""
    return around(unroll, "attention_cached", lambda o, *args: o(*change(*args)))


@mutant("draft_sequence", "forward", None, SERIAL, "A10: tokenspeed #469", **DRAFT)
def cache_misses_the_latest_key():
    return cached(lambda q, k, v: (q, k[:-1], v[:-1]) if len(k) > 1 else (q, k, v))


@mutant("draft_sequence", "forward", None, SERIAL, "T01", **DRAFT)
def cache_forgets_the_first_slot():
    return cached(lambda q, k, v: (q, k[1:], v[1:]) if len(k) > 1 else (q, k, v))


@mutant("draft_sequence", "forward", None, SERIAL, **DRAFT)
def cached_values_in_another_order():
    return cached(lambda q, k, v: (q, k, v.flip(0)))


@mutant("draft_sequence", "forward", None, "the feature recycled is pre-norm", "T19: vLLM #42764", **DRAFT)
def drafting_recycles_the_normed_feature():
    return patch(unroll, "recycle", lambda feature, normed, choices: normed)


@mutant("draft_sequence", "forward", None, "step k is fed given[k-2]", "T07", **DRAFT)
def given_tokens_one_step_late():
    def wrapper(original, params, inputs, *args, **kwargs):
        given = inputs["given"]
        return original(params, inputs | {"given": torch.cat([given[:1], given[:-1]])}, *args, **kwargs)

    return around(unroll, "draft_sequence", wrapper)


@mutant("draft_sequence", "forward", None, "given tokens are used", "own", **DRAFT)
def drafting_feeds_its_own_tokens():
    def wrapper(original, params, inputs, *args, **kwargs):
        return original(params, {n: x for n, x in inputs.items() if n != "given"}, *args, **kwargs)

    return around(unroll, "draft_sequence", wrapper)


@mutant("draft_sequence", "forward", None, "features before the head's norm", "T19", **DRAFT)
def drafting_returns_normed_features():
    def wrapper(original, *args, **kwargs):
        out = original(*args, **kwargs)
        return out | {"features": out["features"] / out["features"].square().mean(-1, keepdim=True).sqrt()}

    return around(unroll, "draft_sequence", wrapper)
