"""A computation as a list of nodes in data order, and the two walks over it.

A node names its value ``(step, stage)``, its arithmetic and the values it reads. The unroll, the autoregressive draft
and the trace checks of the suite all walk the same list, so they cannot be wired differently.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .formats import store
from .ops import Op

Key = str | tuple[int, str]  # a parameter or input by name, a stage's value by (step, stage)


class Node(NamedTuple):
    """One stage of one step. ``detached`` lists the inputs through which no gradient flows."""

    key: Key
    op: Op
    inputs: tuple[Key, ...]
    detached: tuple[Key, ...] = ()


def forward(nodes: Iterable[Node], values: dict) -> None:
    """Fill in ``values[node.key]`` for every node whose value is not already there."""
    for node in nodes:
        if node.key not in values:
            values[node.key] = store(node.op.forward(*(values[key] for key in node.inputs)), node.key)


def contributions(node: Node, values: dict, d_y) -> list[tuple[Key, object]]:
    """The cotangents that a node hands to its inputs: its vector-Jacobian products, each a use that may be rounded."""
    arguments = (values[key] for key in node.inputs)
    products = node.op.backward(*arguments, values[node.key], d_y)
    pairs = zip(node.inputs, products, strict=True)
    return [(key, store(d, key)) for key, d in pairs if d is not None and key not in node.detached]


def backward(nodes: list[Node], values: dict, cotangents: dict, addends: dict | None = None) -> None:
    """Reverse walk: add each node's contributions to ``cotangents``, which holds the outputs' own at the start.

    ``addends`` collects the contributions, by key, as pairs of consumer and contribution.
    """
    for node in reversed(nodes):
        if node.key in cotangents:
            for key, d in contributions(node, values, cotangents[node.key]):
                if addends is not None:
                    addends.setdefault(key, []).append((node.key, d))
                cotangents[key] = store(cotangents[key] + d, key) if key in cotangents else d
