"""The pipeline as an SVG: the stages of one step as boxes in data order, each with a strip of the unrolled steps."""

from functools import cache
from json import dumps, loads

from draftconf.reference.config import Choices
from draftconf.reference.layer import graph

from ...checks.cases import cases_for
from ...checks.walk import is_boundary
from .placing import place
from .ratios import by_step, shade, short, slug, text, worst

WIDTH, HEIGHT, GAP, PITCH, MARGIN = 186, 42, 10, 66, 26
LONG_NAME = 17  # letters; longer ones are set smaller
CELL, STRIP = 9.2, 8
#: Stage methods whose box bears another name.
BOX_OF = {"route": ("route", "experts"), "head": ("logits",)}


def flow(choices: dict, layout: str) -> tuple[list[str], list[tuple[str, str]], list[tuple[str, str]]]:
    """Stages in data order, edges within a step, and edges from one step to the next."""
    return _flow(dumps(choices | {"draft_input": layout}, sort_keys=True))


@cache
def _flow(choices: str):
    chosen = Choices.from_dict(loads(choices))
    nodes = graph(cases_for(chosen)[0].config, chosen, 2)
    sources = {node.key: node.inputs for node in nodes}
    names, edges, onward = [], [], []
    for node in nodes:
        if not is_boundary(node.key):
            continue
        step, stage = node.key
        if stage not in names:
            names.append(stage)
        for key in _boundaries(node.inputs, sources):
            pair = (key[1], stage)
            kept = edges if key[0] == step else onward
            if pair not in kept and pair[0] != "tokens":
                kept.append(pair)
    names = sorted(names, key=lambda n: min(i for i, node in enumerate(nodes) if node.key[1] == n))
    return names, edges, [pair for pair in onward if pair not in edges]


def _boundaries(inputs, sources) -> list:
    """The recordable values among these inputs, or behind them."""
    found = []
    for key in inputs:
        if key in sources and key[0] > 0:
            found += [key] if is_boundary(key) else _boundaries(sources[key], sources)
    return found


def draw(results: dict, policy: str, layout: str, steps: int, first: tuple) -> str:
    """One policy and layout. ``first``: policy, layout, stage and step of the first fault."""
    names, edges, onward = flow(results["subject"]["choices"], layout)
    x, layer, routes = place(names, edges)
    right = max(x.values()) * (WIDTH + GAP) + WIDTH + 2 * MARGIN
    height = (max(layer.values()) + 1) * PITCH - (PITCH - HEIGHT) + 2 * MARGIN
    checks = [c for c in results["checks"] if c["policy"] == policy and c["layout"] == layout]
    at = lambda name: (MARGIN + x[name] * (WIDTH + GAP), MARGIN + layer[name] * PITCH)  # noqa: E731
    boxes = [_box(name, *at(name), checks, steps, policy, layout, first) for name in names]
    shown = [_route(points) for points in routes]
    back = [_onward(at(a), at(b), right) for a, b in onward if layer[a] > layer[b]]
    label = f"data flow of one step, layout {layout}, policy {policy}: {len(names)} stages"
    size = f'viewBox="0 0 {right:.0f} {height:.0f}" width="{right:.0f}" height="{height:.0f}"'
    return f'<svg class="flow" {size} role="group" aria-label="{text(label)}">{"".join(shown + back + boxes)}</svg>'


def _route(points: list) -> str:
    """A smooth line through the places of one edge."""
    centre = lambda p: (MARGIN + p[0] * (WIDTH + GAP) + WIDTH / 2, MARGIN + p[1] * PITCH)  # noqa: E731
    (px, py), path = centre(points[0]), ""
    y = py + HEIGHT
    path = f"M{px:.0f} {y:.0f}"
    for i, point in enumerate(points[1:], start=1):
        cx, top = centre(point)
        middle = (y + top) / 2
        path += f"C{px:.0f} {middle:.0f} {cx:.0f} {middle:.0f} {cx:.0f} {top:.0f}"
        if i < len(points) - 1:
            path += f"V{top + HEIGHT:.0f}"
        px, y = cx, top + HEIGHT
    return f'<path class="edge" d="{path}"/>'


def _onward(start: tuple, end: tuple, right: float) -> str:
    """What the next step reads: around the right side, back to the top."""
    x1, y1 = start[0] + WIDTH, start[1] + HEIGHT / 2
    x2, y2 = end[0] + WIDTH, end[1] + HEIGHT / 2
    out = right - 12
    path = f"M{x1:.0f} {y1:.0f}H{out - 10:.0f}q10 0 10 -10V{y2 + 10:.0f}q0 -10 -10 -10H{x2 + 3:.0f}"
    middle = (y1 + y2) / 2
    turned = f'transform="rotate(90 {out + 5:.0f} {middle:.0f})"'
    words = f'<text class="note" x="{out + 5:.0f}" y="{middle:.0f}" {turned}>read by the next step</text>'
    return f'<path class="edge onward" d="{path}"/>{words}'


def judged(name: str, checks: list[dict]) -> dict:
    """The walk's checks of a stage by direction, and those of the method by itself."""
    walked = [c for c in checks if c["kind"] == "trace" and c["stage"] == name and c["quantity"] != "gradient"]
    alone = [c for c in checks if c["kind"] == "stage" and name in BOX_OF.get(c["stage"], (c["stage"],))]
    forward = [c for c in walked if c["quantity"] in ("value", "decision")]
    return {"forward": forward, "backward": [c for c in walked if c["quantity"] == "cotangent"], "alone": alone}


def _box(name: str, x: float, y: float, checks: list, steps: int, policy: str, layout: str, first: tuple) -> str:
    found = judged(name, checks)
    forward, backward = (by_step(found[way], steps) for way in ("forward", "backward"))
    alone = worst([c["ratio"] for c in found["alone"]])
    overall = worst([*(c["ratio"] for way in found.values() for c in way), *forward, *backward])
    is_first = first[:3] == (policy, layout, name)
    marks = f"box {shade(overall)}{' first' if is_first else ''}"
    told = _told(name, forward, backward, alone, first[3] if is_first else None)
    size = " long" if len(name) > LONG_NAME else ""
    parts = [
        f'<a href="#{slug("row", policy, layout, name)}" class="{marks}" aria-label="{text(told)}">',
        f"<title>{text(told)}</title>",
        f'<rect class="body" x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>',
        f'<rect class="bar" x="{x:.0f}" y="{y:.0f}" width="6" height="{HEIGHT}" rx="3"/>',
        f'<text class="name{size}" x="{x + 14:.0f}" y="{y + 17:.0f}">{text(name)}</text>',
        f'<text class="value" x="{x + WIDTH - 8:.0f}" y="{y + 17:.0f}">{text(short(overall))}</text>',
        *_strip(forward, x + 14, y + 26, first[3] if is_first else None),
        *(_strip(backward, x + 14 + 7.6 * (CELL + 1), y + 26, None) if any_of(backward) else ()),
    ]
    if alone is not None:
        parts.append(f'<circle class="cell {shade(alone)}" cx="{x + WIDTH - 12:.0f}" cy="{y + 30:.0f}" r="4"/>')
    if is_first:
        parts.append(f'<text class="flag" x="{x + 2:.0f}" y="{y - 6:.0f}">first fault{_at(first[3])}</text>')
    return "".join(parts) + "</a>"


def stacked(results: dict, policy: str, layout: str, steps: int, first: tuple) -> str:
    """The same boxes one below the other, for a narrow screen."""
    checks = [c for c in results["checks"] if c["policy"] == policy and c["layout"] == layout]
    rows = []
    for name in flow(results["subject"]["choices"], layout)[0]:
        found = judged(name, checks)
        strips = {way: by_step(found[way], steps) for way in ("forward", "backward")}
        overall = worst([*(c["ratio"] for way in found.values() for c in way)])
        is_first = first[:3] == (policy, layout, name)
        flag = f'<em class="flag">first fault{_at(first[3])}</em>' if is_first else ""
        cells = "".join(
            f'<i class="strip" title="{way}">{"".join(f"<b class={shade(r)}></b>" for r in ratios)}</i>'
            for way, ratios in strips.items()
            if any_of(ratios)
        )
        link = f'href="#{slug("row", policy, layout, name)}" class="box {shade(overall)}{" first" if is_first else ""}"'
        rows.append(
            f"<li>{flag}<a {link}><span>{text(name)}</span> <span>{text(short(overall))}</span>{cells}</a></li>"
        )
    return f'<ol class="stack" aria-label="stages in data order">{"".join(rows)}</ol>'


def any_of(ratios: list) -> bool:
    return any(r is not None for r in ratios)


def _at(step) -> str:
    return f", step {step}" if step else ""


def _strip(ratios: list, x: float, y: float, marked) -> list[str]:
    if not any_of(ratios):
        return [f'<text class="none" x="{x:.0f}" y="{y + 7:.0f}">not recorded</text>']
    cells, width = [], min(CELL, 7 * CELL / max(len(ratios), 1))
    for k, ratio in enumerate(ratios):
        mark = " marked" if marked == k + 1 else ""
        place = f'x="{x + k * (width + 1):.1f}" y="{y}" width="{width:.1f}" height="{STRIP}"'
        cells.append(f'<rect class="cell {shade(ratio)}{mark}" {place}/>')
    return cells


def _told(name: str, forward: list, backward: list, alone, first) -> str:
    """The same in words, for a pointer that rests on it and for a screen reader."""
    parts = [name]
    for way, ratios in (("forward", forward), ("backward", backward)):
        if any_of(ratios):
            parts.append(f"{way} by step {' '.join(short(r) for r in ratios)}")
    if alone is not None:
        parts.append(f"by itself {short(alone)}")
    if len(parts) == 1:
        parts.append("not recorded")
    return "; ".join(parts) + (f"; first fault{_at(first)}" if first is not None else "")
