"""The faults: grouped by what is blamed, each expandable down to its worst element in hexadecimal."""

from ...judging.operands import lines, title
from ..repeat import repeat
from ..results import faults, measure
from ..text import cell, show
from .parts import command, finding_anchor, folded, grouped, number, table
from .ratios import text, worst

NOTE = "<p>By what is blamed, in data order: the first is the one to look at, later ones may follow from it.</p>"


def findings(results: dict, full: int, brief: int) -> str:
    """The first ``full`` faults in all their detail, ``brief`` more of each group as a line, the rest as a count."""
    found = faults(results)
    parts = []
    for place, ((name,), group) in enumerate(grouped([c | {"blame": blamed(c)} for c in found], "blame")):
        shown = group[:full]
        full -= len(shown)
        inner = "".join(finding(c, results, opened=place == 0 and c is group[0]) for c in shown)
        inner += _brief(group[len(shown) :], brief)
        count = f"{len(group)} check{'s' if len(group) > 1 else ''}"
        tally = f"{count}, worst error/bound {cell(worst([c['ratio'] for c in group]))}"
        opened = {"open": ""} if place == 0 else {}
        parts.append(folded(f"<b>{text(name)}</b> <small>{text(tally)}</small>", inner, class_="group", **opened))
    return NOTE + "".join(parts) if parts else ""


def blamed(check: dict) -> str:
    """Step, stage and direction."""
    step = f"step {check['first_step']}, " if check["first_step"] else ""
    way = {"stage": " by itself", "end_to_end": " end to end"}.get(check["kind"], "")
    if not way and check["order"] and check["order"][0] != 0:
        way = " backward"
    return f"{step}stage {check['extra'].get('blamed', check['stage'])}{way}"


def finding(check: dict, results: dict, opened: bool) -> str:
    element = check["worst"] or {}
    parts = [f"<p>{text(check['message'])}</p>"]
    if check["steps"]:
        strip = "".join(f"<li>{number(r)}</li>" for r in check["steps"])
        parts.append(f'<ol class="strip" aria-label="error over bound at each step">{strip}</ol>')
    if rows := [[key, text(show(element[key])), _hexadecimal(element, key)] for key in _numbers(element)]:
        where = ", ".join(_where(check, element))
        parts += [f"<p>{text(where)}</p>", table(["", "decimal", "hexadecimal"], rows, "worst element")]
    if element.get("operands"):
        parts.append(folded("Its operands, in hexadecimal", operands_of(element), class_="operands"))
    parts.append(command(repeat(check, results)))
    summary = f"<code>{text(check['id'])}</code> {number(check['ratio'])}"
    attributes = {"class_": "finding", "id": finding_anchor(check)} | ({"open": ""} if opened else {})
    return folded(summary, "".join(parts), **attributes)


def operands_of(element: dict) -> str:
    """What the expected value was made of: a table for each operand."""
    note = (
        "<p>What the expected value was made of: the implementation's own recorded inputs, where it recorded them.</p>"
    )
    tables = (
        table([title(each), "decimal", "hexadecimal"], [[text(c) for c in line] for line in lines(each)], each["name"])
        for each in element["operands"]
    )
    return note + "".join(tables)


def _where(check: dict, element: dict) -> list[str]:
    where = [f"element {element['index']}"] if element.get("index") is not None else []
    where += [f"step {element['step']}"] if element.get("step") else []
    return where + ([f"signed bias z = {cell(check['bias'])}"] if check["bias"] is not None else [])


def _numbers(element: dict) -> list[str]:
    apart = ("step", "index", "format", "operands")
    return [k for k, v in element.items() if v is not None and k not in apart and not k.endswith(("_hex", "_bits"))]


def _hexadecimal(element: dict, key: str) -> str:
    """Exactly, as the float that it is."""
    value = element.get(f"{key}_hex", element[key])
    bits = f" ({element['format']} {element[f'{key}_bits']})" if f"{key}_bits" in element else ""
    return text((value.hex() if isinstance(value, float) else str(value)) + bits)


def _brief(group: list[dict], limit: int) -> str:
    listed = "".join(
        f'<li id="{finding_anchor(c)}"><code>{text(c["id"])}</code> {text(measure(c))}</li>' for c in group[:limit]
    )
    left = len(group) - limit
    more = f"<p>{left} more of these are in the results file.</p>" if left > 0 else ""
    return (f'<ul class="lines">{listed}</ul>' if listed else "") + more
