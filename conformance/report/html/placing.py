"""Where the boxes of a data-flow graph go: layers from top to bottom, few crossings, straight chains.

Sugiyama's method in brief: a node's layer is its longest way from a source, edges over several layers get a narrow
dummy in each, the order within a layer follows the mean place of the neighbours, and places are then as close to that
mean as the widths allow (isotonic regression, by pooling adjacent violators).
"""

from collections import defaultdict
from itertools import pairwise

DUMMY = 0.16  # width of a passing edge, in boxes
SWEEPS = 12


def layers_of(names: list[str], edges: list[tuple[str, str]]) -> dict[str, int]:
    """Longest way from a source. ``names`` are in data order, so every edge points forward."""
    layer = {}
    for name in names:
        layer[name] = max((layer[a] + 1 for a, b in edges if b == name and a in layer), default=0)
    return layer


def place(names: list[str], edges: list[tuple[str, str]]) -> tuple[dict, dict, list]:
    """x (in boxes, centres, the least 0) and layer of every node, and each edge as the points it passes through."""
    layer = layers_of(names, edges)
    chains, rows = [], defaultdict(list)
    for name in names:
        rows[layer[name]].append(name)
    for a, b in edges:
        dummies = [(a, b, level) for level in range(layer[a] + 1, layer[b])]
        for dummy in dummies:
            rows[dummy[2]].append(dummy)
        chains.append([a, *dummies, b])
    x = _settle([rows[level] for level in sorted(rows)], _neighbours(chains))
    least = min(x[name] for name in names) if names else 0.0
    x = {name: at - least for name, at in x.items()}
    level = lambda node: layer[node] if isinstance(node, str) else node[2]  # noqa: E731
    return x, layer, [[(x[node], level(node)) for node in chain] for chain in chains]


def _neighbours(chains: list[list]) -> tuple[dict, dict]:
    above, below = defaultdict(list), defaultdict(list)
    for chain in chains:
        for a, b in pairwise(chain):
            below[a].append(b)
            above[b].append(a)
    return above, below


def _settle(rows: list[list], neighbours: tuple[dict, dict]) -> dict:
    """Sweep down and up, ordering each row by its neighbours' mean place and then moving it there."""
    x = {node: float(i) for row in rows for i, node in enumerate(row)}
    for sweep in range(SWEEPS):
        near = neighbours[sweep % 2]
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = {n: _mean([x[other] for other in near[n]], x[n]) for n in row}
            row.sort(key=lambda n: (wanted[n], x[n]))
            for node, at in zip(row, _pooled(row, [wanted[n] for n in row]), strict=True):
                x[node] = at
    return x


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _width(node) -> float:
    return 1.0 if isinstance(node, str) else DUMMY


def _pooled(row: list, wanted: list[float]) -> list[float]:
    """The places nearest to ``wanted`` that keep this order and overlap nowhere."""
    offsets, reach = [], 0.0
    for i, node in enumerate(row):
        reach += (_width(row[i - 1]) + _width(node)) / 2 if i else 0.0
        offsets.append(reach)
    pools: list[list[float]] = []  # mean, count
    for value in (w - o for w, o in zip(wanted, offsets, strict=True)):
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, count = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count), pools[-1][1] + count]
    means = [mean for mean, count in pools for _ in range(count)]
    return [m + o for m, o in zip(means, offsets, strict=True)]
