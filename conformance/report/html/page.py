"""The results as one HTML page that needs nothing else: no network, no fonts, no libraries; light and dark.

Everything is drawn here; the script only switches panels, the theme and the like, and without it all is shown.
"""

from importlib.resources import files

from ..repeat import repeat
from ..results import FAULTS, STATUSES, blame, faults
from ..text import cell, closing, rank, title
from . import charts, tables
from .findings import findings
from .parts import command, finding_anchor, folded, gravest, grouped, number, table, tag
from .pipeline import draw, stacked
from .ratios import by_step, legend, slug, text, worst

LIMIT = 2 * 1024 * 1024  # bytes
#: How much detail, most first: findings in full, findings as a line, whether passing rows show their worst element.
DETAIL = ((400, 2000, True), (150, 300, True), (60, 60, False), (20, 20, False), (5, 5, False))
STEPS = 7
INTRO = (
    "<p>One step in data order, a box for each stage, coloured by its worst error over bound. In each box, left to "
    "right: forward at steps 1 to 7, backward at steps 1 to 7, and a dot for the stage checked by itself. Choose a box "
    "to see its numbers.</p>"
)
NO_WALK = "<p>The walk along the seven steps needs <code>unroll</code>, so only single stages were checked.</p>"


def html(results: dict, changes: dict | None = None) -> str:
    """The page, with as much detail as fits under 2 MiB. The same text for the same results."""
    page = ""
    for detail in DETAIL:
        page = whole(results, changes, *detail)
        if len(page.encode()) < LIMIT:
            break
    return page


def whole(results: dict, changes: dict | None, full: int, brief: int, passing: bool) -> str:
    sections = {
        "pipeline": ("Pipeline", pipeline(results, passing)),
        "changes": ("Changes", tables.changed(changes, brief)),
        "findings": ("Findings", findings(results, full, brief)),
        "stages": ("Stages", tables.stages(results)),
        "ratios": ("Error over bound", charts.histograms(results)),
        "growth": ("Free run", charts.growths(results)),
        "end": ("End to end", tables.end_to_end(results)),
        "decisions": ("Decisions", tables.decisions(results)),
        "rest": ("Not judged", tables.not_judged(results)),
        "about": ("About this run", tables.about(results)),
    }
    kept = [(name, head, body) for name, (head, body) in sections.items() if body]
    links = "".join(f'<a href="#{name}">{text(head)}</a>' for name, head, _ in kept)
    body = "".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{text(head)}</h2>{inner}</section>'
        for name, head, inner in kept
    )
    heading = f"Conformance of {title(results['subject'])}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{text(heading)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><style>{asset("style.css")}</style></head><body>
<a class="skip" href="#main">Skip to the report</a><header>{banner(results, heading)}</header>
<nav aria-label="sections"><div class="links">{links}</div>
<button id="theme" type="button" hidden>Theme: system</button></nav>
<main id="main">{body}</main><script>{asset("script.js")}</script></body></html>
"""


def asset(name: str) -> str:
    return files("draftconf.conformance.report.html").joinpath(name).read_text(encoding="utf-8")


# -- the verdict -------------------------------------------------------------------------------------------------------


def banner(results: dict, heading: str) -> str:
    good = results["verdict"] == "no fault found"
    state = "good" if good and results["complete"] else "part" if good else "bad"
    found = faults(results)
    sentence = f"First fault: {blame(found[0])}" if found else closing(results)
    parts = [f'<p class="verdict {state}"><strong>{text(results["verdict"])}</strong></p>', tag("h1", text(heading))]
    parts.append(f'<p class="sentence">{text(sentence)}</p>')
    if found:
        parts.append(command(repeat(found[0], results)))
    parts += [f'<p class="problem">{text(problem)}</p>' for problem in results["problems"]]
    return "".join(parts) + counts(results)


def counts(results: dict) -> str:
    """One number for each status, never a rate."""
    found = results["counts"]
    shown = [("planned", "planned"), ("executed", "executed"), *((s, v) for v, s in STATUSES.items() if found[s])]
    chips = "".join(
        f'<div class="is-{slug(verdict)}"><dt>{text(status)}</dt><dd>{found[status]}</dd></div>'
        for status, verdict in shown
    )
    complete = "yes" if results["complete"] else "no"
    return f'<dl class="counts">{chips}<div><dt>complete</dt><dd>{complete}</dd></div></dl>'


# -- the pipeline ------------------------------------------------------------------------------------------------------


def first_place(results: dict) -> tuple:
    """Policy, layout, stage and step of the first fault."""
    for check in faults(results)[:1]:
        return check["policy"], check["layout"], check["extra"].get("blamed", check["stage"]), check["first_step"]
    return "", "", "", None


def pipeline(results: dict, passing: bool) -> str:
    """A panel for each policy and layout in which something ran."""
    subject, ran = results["subject"], tables.ran(results)
    seen = {(c["policy"], c["layout"]) for c in ran}
    shown = [(p, at) for at in subject["layouts"] for p in subject["policies"] if (p, at) in seen]
    if not shown:
        return ""
    first = first_place(results)
    chosen = first[:2] if first[:2] in shown else shown[0]
    tabs = "".join(tab(results, place, place == chosen) for place in shown)
    panels = "".join(panel(results, *place, first, passing) for place in shown)
    intro = INTRO if any(c["kind"] == "trace" for c in ran) else NO_WALK
    return f'{intro}{legend()}<div role="tablist" aria-label="policy and layout" hidden>{tabs}</div>{panels}'


def tab(results: dict, place: tuple, chosen: bool) -> str:
    faulty = sum((c["policy"], c["layout"]) == place and c["verdict"] in FAULTS for c in results["checks"])
    count = f' <span class="count">{faulty} faulty</span>' if faulty else ""
    return tag(
        "button", text(" · ".join(place)) + count, type="button", role="tab", id=f"tab-{slug(*place)}",
        aria_controls=f"panel-{slug(*place)}", aria_selected="true" if chosen else "false",
    )  # fmt: skip


def panel(results: dict, policy: str, layout: str, first: tuple, passing: bool) -> str:
    walked = [c for c in tables.ran(results, "trace") if (c["policy"], c["layout"]) == (policy, layout)]
    name = f"{policy} {layout}"
    steps = max([STEPS, *(len(c["steps"]) for c in walked)])
    place = (results, policy, layout, steps, first)
    region = {"class_": "scroll wide", "tabindex": "0", "role": "region", "aria_label": f"pipeline {name}"}
    boxes = tag("div", draw(*place), **region) + stacked(*place)
    if walked:
        boxes += folded(f"Numbers, {text(name)}", numbers(walked, policy, layout, steps, passing))
    else:
        boxes = folded("Where its stages lie in the step", boxes)
    known = {"id": f"panel-{slug(policy, layout)}", "aria_labelledby": f"tab-{slug(policy, layout)}"}
    return tag("div", f"<h3>{text(name)}</h3>{boxes}", role="tabpanel", class_="panel", **known)


def numbers(checks: list[dict], policy: str, layout: str, steps: int, passing: bool) -> str:
    """A row for each stage and quantity: what the boxes show, in digits, and its worst element."""
    rows, named = [], set()
    for (stage, quantity), group in grouped(checks, "stage", "quantity"):
        anchor = slug("row", policy, layout, stage)
        mark = f' id="{anchor}"' if anchor not in named else ""
        named.add(anchor)
        stepwise = any(c["steps"] for c in group)
        ratios = by_step(group, steps) if stepwise else [worst([c["ratio"] for c in group])]
        cells = [number(r) for r in ratios] + [""] * (steps - len(ratios))
        z = cell(worst([c["bias"] for c in group]))
        rows.append([f"<span{mark}>{text(stage)}</span>", text(quantity), *cells, z, element(group, passing)])
    head = ["stage", "quantity", *(f"step {k + 1}" for k in range(steps)), "bias z", "worst element"]
    return table(head, rows, f"numbers {policy} {layout}")


def element(group: list[dict], passing: bool) -> str:
    """The worst element of these checks, or a link to the finding."""
    check = gravest(group)
    if check["verdict"] in FAULTS:
        return f'<a href="#{finding_anchor(check)}">{text(check["verdict"])}, see findings</a>'
    worst_one = check["worst"]
    if not passing or not worst_one or not rank(check["ratio"]) > 0:
        return ""
    actual, expected = (worst_one.get(f"{key}_hex", worst_one[key]) for key in ("actual", "expected"))
    digits = f"{actual} for {expected}"
    return f'<span class="hex">{text(check["case"])} {text(worst_one["index"])}: {text(digits)}</span>'
