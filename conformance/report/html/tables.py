"""The sections that are tables: stages by themselves, end to end, decisions, what was not judged, the run."""

from math import isfinite, log10

from ...protocol.plain import number as as_number
from ..results import DECISIONS, FAULTS, sum_decisions
from ..text import cell, pairs, rank, worst_check
from .parts import finding_anchor, folded, gravest, grouped, lines, number, table, tag
from .ratios import shade, short, text, worst

FOLDED_ROWS = 12


def ran(results: dict, *kinds: str) -> list[dict]:
    """The checks of these kinds (of any, if none is named) that have a verdict of their own."""
    without = ("deselected", "not offered", "lost")
    return [c for c in results["checks"] if c["verdict"] not in without and (not kinds or c["kind"] in kinds)]


def cell_of(checks: list[dict]) -> str:
    """The gravest of these checks."""
    if not checks:
        return ""
    check = gravest(checks)
    if check["verdict"] == "undecided":
        return _width(check)
    if check["verdict"] in FAULTS:
        seen = number(check["ratio"]) if rank(check["ratio"]) > 1 else text(check["verdict"])
        return f'<a class="fault" href="#{finding_anchor(check)}">{seen}</a>'
    return number(check["ratio"])


def _width(check: dict) -> str:
    """What an undecided check could not tell apart; the bar reaches from 0.01 to 100."""
    width = as_number(check["extra"].get("width"))
    if width is None:
        return '<span class="undecided">undecided</span>'
    share = (log10(max(width, 0.01)) + 2) / 4 if isfinite(width) else 1.0
    bar = f"--w:{min(max(share, 0.02), 1):.2f}"
    return f'<span class="undecided" style="{bar}">undecided, {text(cell(width))} wide</span>'


def stages(results: dict) -> str:
    """A tile for every method that was checked by itself."""
    policies, tiles = list(results["subject"]["policies"]), []
    for (stage,), group in grouped(ran(results, "stage"), "stage"):
        rows = [
            [text(quantity), *(cell_of([c for c in part if c["policy"] == policy]) for policy in policies)]
            for (quantity,), part in grouped(group, "quantity")
        ]
        overall = worst([c["ratio"] for c in group])
        mark = f'<span class="swatch {shade(overall)}"></span>'
        head = f"{mark}<b>{text(stage)}</b> <small>{text(short(overall))}</small>"
        tiles.append(folded(head, table(["quantity", *policies], rows, f"{stage} by itself"), class_="tile"))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def end_to_end(results: dict) -> str:
    checks, subject = ran(results, "end_to_end"), results["subject"]
    place = lambda c: (c["policy"], c["layout"], c["case"])  # noqa: E731
    across = list(dict.fromkeys(place(c) for c in checks if c["quantity"] != "frozen"))
    across.sort(key=lambda at: (list(subject["policies"]).index(at[0]), list(subject["layouts"]).index(at[1])))
    rows = [
        [text(quantity), *(cell_of([c for c in group if place(c) == at]) for at in across)]
        for (quantity,), group in grouped(checks, "quantity")
    ]
    undecided = sum(c["verdict"] == "undecided" for c in checks)
    note = (
        f"<p>{undecided} undecided: honest rounding alone spreads further than a tenth of the quantity, so that a "
        "result inside that width decides nothing. The bar shows the width, from 0.01 to 100 of the quantity.</p>"
    )
    whole = table(["quantity", *map(" ".join, across)], rows, "end to end")
    return (note if undecided else "") + whole if rows else ""


def decisions(results: dict) -> str:
    rows = []
    for (policy, stage), group in grouped([c for c in results["checks"] if c["decisions"]], "policy", "stage"):
        total = sum_decisions(group)
        rows.append([text(f"{stage} · {policy}"), *(str(total[key]) for key in DECISIONS)])
    note = "<p>A decision that differs from the oracle's is flipped; it is legal where its margin allows that.</p>"
    return note + table(["stage", *DECISIONS], rows, "decisions") if rows else ""


def not_judged(results: dict) -> str:
    """What was not offered, and what a deviations file excuses."""
    absent = [c for c in results["checks"] if c["verdict"] == "not offered"]
    rows = [[text(s), text(why), str(len(g))] for (s, why), g in grouped(absent, "stage", "message")]
    whole = table(["stage", "why", "checks"], rows, "not offered") if rows else ""
    if len(rows) > FOLDED_ROWS:
        whole = folded(f"{len(absent)} checks not offered", whole)
    known = [c for c in results["checks"] if c["verdict"] == "known deviation"]
    reason = lambda c: c["extra"].get("deviation", {}).get("reason", "")  # noqa: E731
    rows = [[f"<code>{text(c['id'])}</code>", text(cell(c["ratio"])), text(reason(c))] for c in known]
    return whole + (table(["known deviation", "error/bound", "reason"], rows, "known deviations") if rows else "")


def changed(changes: dict | None, limit: int) -> str:
    """What an earlier run had otherwise."""
    if changes is None:
        return ""
    from ..changes import sections

    parts = [tag("p", text(note)) for note in changes["notes"]]
    for head, entries in sections(changes):
        parts.append(folded(f"<b>{text(head)}</b> <small>{len(entries)}</small>", lines(entries, limit), open=""))
    return "".join(parts) or "<p>Nothing has changed.</p>"


def about(results: dict) -> str:
    subject, suite, selection = results["subject"], results["suite"], results["selection"]
    top = worst_check(results["checks"])
    rows = [
        ("adapter", subject["adapter"]), ("url", subject["url"]),
        *((f"formats of {name}", pairs(formats)) for name, formats in subject["policies"].items()),
        ("choices that differ from the default", pairs(subject["choices"]) or "none"),
        ("offers", ", ".join(subject["offers"]) or "nothing"),
        ("suite", f"{suite['version']}, stages and cases {suite['hash']}, protocol {suite['protocol']}"),
        ("seed", results["seed"]),
        ("versions", ", ".join(f"{k} {v}" for k, v in results["environment"].items() if v)),
        ("adapter's process", _process(results["isolation"])),
        ("narrowed by", ", ".join(f"--{n} {selection[n]}" for n in ("stage", "policy") if selection[n])),
        ("elements compared", results["compared"]),
        ("worst error/bound", f"{cell(top['ratio'])} in {top['id']}" if top else ""),
        *(("note", note) for note in results["notes"]),
    ]  # fmt: skip
    return table(["", ""], [[text(k), text(v)] for k, v in rows if v != ""], "about this run")


def _process(isolation: dict) -> str:
    if not isolation["isolated"]:
        return "the suite's own"
    parts = [f"its own, {isolation['python'] or 'the same interpreter'}", f"{isolation['timeout']:g} s for a call"]
    return ", ".join(parts + ([f"{isolation['memory']:g} GiB"] if isolation["memory"] else []))
