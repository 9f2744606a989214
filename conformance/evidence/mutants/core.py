"""What a mutant is, and the few tools that make one out of the twin ``fast``."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from unittest import mock

import torch

from draftconf.fast import attention, fusion, layer, moe, ops

patch = mock.patch.object
STEPS = 7
DIRECTIONS = ("forward", "backward", "decision", "frozen", "graph")


@dataclass(frozen=True)
class Mutant:
    """One wrong implementation and the blame it must get.

    ``change()`` is a context in which ``fast`` is wrong. ``step`` is the first step to be blamed, backward the last
    one; None where a fault has no step. Direction ``graph`` stands for a fault in what reads what, which may show
    either way. ``methods``: the fault is put before these methods' own checks instead of the unroll. ``says``: what
    the message must name where no stage can carry the blame.
    """

    name: str
    area: str
    stage: str
    direction: str
    step: int | None
    rule: str
    source: str
    change: Callable[[], AbstractContextManager]
    layout: str = "mtp"
    policy: str = "float32"
    choices: Mapping = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    says: str = ""
    why: str = ""  # where the suite's blame is known to differ: why that is


def area(name: str, catalogue: list[Mutant]):
    """A decorator factory that files mutants under ``name``."""

    def mutant(stage: str, direction: str, step: int | None, rule: str, source: str = "own", **where):
        def file(change):
            catalogue.append(Mutant(change.__name__, name, stage, direction, step, rule, source, change, **where))
            return change

        return file

    return mutant


# -- changing the twin -------------------------------------------------------------------------------------------------


def around(module, name: str, wrapper):
    """``module.name(...)`` becomes ``wrapper(original, ...)``."""
    original = getattr(module, name)
    return patch(module, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def after(module, name: str, change):
    """``change`` of what ``module.name`` returns."""
    return around(module, name, lambda original, *args, **kwargs: change(original(*args, **kwargs)))


def during(module, name: str, inner: Callable[[], AbstractContextManager]):
    """``inner()`` holds only while ``module.name`` runs."""

    def wrapper(original, *args, **kwargs):
        with inner():
            return original(*args, **kwargs)

    return around(module, name, wrapper)


def both(*contexts: AbstractContextManager) -> ExitStack:
    """Several changes at once."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def everywhere(name: str, wrapper):
    """``around`` for a function of ``fast.ops`` in every module that imports it."""
    return both(*(around(m, name, wrapper) for m in (ops, attention, fusion, layer, moe) if hasattr(m, name)))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_y):
        return ctx.change(d_y), None


def backward(x: torch.Tensor, change) -> torch.Tensor:
    """x, its cotangent changed on the way back."""
    return _Backward.apply(x, change)


def with_gradient_of(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``value`` forward, the gradient of ``other`` backward."""
    return value.detach() + (other - other.detach())


def rows_of(shape, device=None) -> torch.Tensor:
    """0, 1, 2, ... along the slots, to broadcast against [B, T, ...]."""
    return torch.arange(shape[1], device=device).reshape(1, -1, *[1] * (len(shape) - 2))


# -- norms -------------------------------------------------------------------------------------------------------------


def norm_with(eps_change=lambda eps: eps, denominator=None, outside=False, gain=lambda w: w, center=False):
    """A wrapper for ``rms_norm`` that is wrong in the way asked for."""

    def wrapper(original, x, weight, eps):
        wide = x.to(ops.wide(x.dtype))
        if center:
            wide = wide - wide.mean(-1, keepdim=True)
        mean = wide.square().sum(-1, keepdim=True) / (x.shape[-1] if denominator is None else denominator(x.shape[-1]))
        eps = eps_change(eps)
        root = mean.sqrt() + eps if outside else (mean + eps).sqrt()
        return (gain(weight.to(wide.dtype)) * (wide / root)).to(x.dtype)

    return wrapper
