"""Renderings of the results: terminal lines, results.json and REPORT.md. Nothing here decides anything."""

import json
import os
from collections import defaultdict
from pathlib import Path

from conformance.results import (
    DECISIONS,
    FAULTS,
    STATUSES,
    blame,
    faults,
    measure,
    number,
    repeat,
    suite,
    sum_decisions,
)

FINDINGS_IN_FULL = 40
STEPS = 7

# -- terminal --------------------------------------------------------------------------------------------------------


def header(subject: dict, adapter: str, seed: int) -> list[str]:
    about = suite()
    return [
        f"adapter {adapter}: {' '.join(filter(None, (subject['name'], subject['version'], subject['url'])))}",
        f"policies {', '.join(subject['policies'])}; layouts {', '.join(subject['layouts'])}",
        *(f"  {name}: {_pairs(formats)}" for name, formats in subject["policies"].items()),
        f"choices: {_pairs(subject['choices']) or 'all default'}",
        f"suite {about['version']} ({about['hash']}), protocol {about['protocol']}, seed {seed}",
    ]


def summary(results: dict) -> list[str]:
    subject, about, environment = results["subject"], results["suite"], results["environment"]
    lines = [
        f"{subject['name']} {subject['version']}; suite {about['version']} ({about['hash']}), seed {results['seed']}; "
        + ", ".join(f"{name} {value}" for name, value in environment.items() if value),
        counts_line(results),
    ]
    worst = worst_check(results["checks"])
    if worst:
        lines.append(f"worst error/bound {cell(worst['ratio'])}, in {worst['id']}")
    lost = [check["id"] for check in results["checks"] if check["verdict"] == "lost"]
    if lost:
        lines.append(f"no result came back for {', '.join(lost[:10])}{' and others' if len(lost) > 10 else ''}")
    return lines + results["problems"]


def counts_line(results: dict) -> str:
    counts = results["counts"]
    parts = [f"{counts[status]} {status}" for status in STATUSES.values() if counts[status] or status == "passed"]
    return f"planned {counts['planned']}, executed {counts['executed']}: {', '.join(parts)}"


def closing(results: dict) -> str:
    """The one sentence that a run ends with."""
    counts, subject = results["counts"], results["subject"]
    if results["first_fault"]:
        return results["first_fault"]["sentence"]
    if results["problems"]:
        return f"Fault: {results['problems'][0]}"
    if results["verdict"] == "nothing checked":
        return f"No check was executed, so there is no verdict on {subject['name']}: {_why_nothing(results)}."
    if results["verdict"] == "checks lost":
        lost = f"{counts['lost']} of {counts['planned']} checks gave no result"
        return f"{lost}, so there is no verdict on {subject['name']}."
    rest = [f"{counts[status]} {status}" for status in ("undecided", "not offered") if counts[status]]
    listed = ", ".join([f"{counts['passed']} passed", *rest])
    return f"No fault found: {listed}{'' if results['complete'] else '; this is only a part of the plan'}."


def _why_nothing(results: dict) -> str:
    counts = results["counts"]
    if not counts["planned"]:
        return "the adapter offers nothing that this suite checks"
    if counts["deselected"] == counts["planned"]:
        return f"all {counts['planned']} planned checks were deselected"
    planned, absent, lost = (counts[name] for name in ("planned", "not offered", "lost"))
    return f"of {planned} planned checks {absent} are not offered and {lost} gave no result"


def failure(check: dict, command: str, details: str = "") -> str:
    """What a failing check shows, in place of a traceback."""
    lines = [f"{measure(check)} [{check['case']}]", f"  check   {check['id']}"]
    if check["message"]:
        lines.append(f"  what    {check['message']}")
    if check["steps"]:
        lines.append("  step    " + " ".join(f"{step:>8}" for step in range(1, len(check["steps"]) + 1)))
        lines.append("  ratio   " + " ".join(f"{cell(ratio):>8}" for ratio in check["steps"]))
    if check["worst"]:
        lines += [f"  {key:7} {_show(value)}" for key, value in check["worst"].items() if value is not None]
    lines += [f"  at      {line}" for line in details.splitlines()]
    return "\n".join([*lines, f"  repeat  {command}"])


def worst_check(checks: list[dict]) -> dict | None:
    measured = [check for check in checks if check["ratio"] is not None and check["verdict"] in ("pass", *FAULTS)]
    return max(measured, key=lambda check: _rank(check["ratio"]), default=None)


def _rank(ratio) -> float:
    value = number(ratio)
    return -1.0 if value is None else float("inf") if value != value else value


def cell(ratio) -> str:
    """A ratio to two digits."""
    value = number(ratio)
    if value is None:
        return "-"
    return f"{value:.0f}" if 99.5 <= value < 1e6 else f"{value:.2g}"


def _show(value) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def _pairs(mapping: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in mapping.items())


# -- files -----------------------------------------------------------------------------------------------------------


def write_json(results: dict, path) -> None:
    _write(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def write_markdown(results: dict, path) -> None:
    _write(path, markdown(results))


def _write(path, text: str) -> None:
    """By renaming, so that a run cut short leaves the old file and never half a new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# -- REPORT.md -------------------------------------------------------------------------------------------------------


def markdown(results: dict) -> str:
    """The same text for the same results: no dates, no durations."""
    checks, subject = results["checks"], results["subject"]
    parts = [
        f"# Conformance report: {' '.join(filter(None, (subject['name'], subject['version'])))}",
        f"**{_verdict_line(results)}**",
        _overview(results),
        "Numbers are error over bound: at most 1 conforms, more is **bold**, `-` was not measured. Each is the worst "
        "over the cases and elements of its row.",
        *_trace_tables(checks),
        _end_to_end_table(checks),
        _decision_table(checks),
        _stage_table(checks),
        _not_offered(checks),
        _findings(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict_line(results: dict) -> str:
    first = results["first_fault"]
    if first is None:
        return _escape(closing(results))
    check = next(check for check in results["checks"] if check["id"] == first["id"])
    return _escape(f"Fault found. First fault: {blame(check)}.")


def _overview(results: dict) -> str:
    subject, about, counts, selection = (results[key] for key in ("subject", "suite", "counts", "selection"))
    narrowed = [f"--{name} {selection[name]}" for name in ("stage", "policy") if selection[name]]
    rows = [("adapter", f"`{subject['adapter']}`"), ("url", subject["url"])]
    rows += [(f"formats of policy {name}", _pairs(formats)) for name, formats in subject["policies"].items()]
    rows += [
        ("choices that differ from the default", _pairs(subject["choices"]) or "none"),
        ("layouts", ", ".join(subject["layouts"])),
        ("suite", f"{about['version']}, stages and cases {about['hash']}, protocol {about['protocol']}"),
        ("seed", results["seed"]),
        ("versions", ", ".join(f"{name} {value}" for name, value in results["environment"].items() if value)),
        ("narrowed by", ", ".join(narrowed)),
        *((name, counts[name]) for name in counts),
        ("complete", "yes" if results["complete"] else "no"),
        ("elements compared", results["compared"]),
        ("worst error/bound", _worst(results["checks"])),
        *(("problem", problem) for problem in results["problems"]),
    ]
    return _table(["", ""], [row for row in rows if row[1] != ""])


def _worst(checks: list[dict]) -> str:
    worst = worst_check(checks)
    return f"{cell(worst['ratio'])} in `{worst['id']}`" if worst else ""


def _trace_tables(checks: list[dict]) -> list[str]:
    traced = _grouped(_ran(checks, "trace"), "policy", "layout")
    return [f"## The walk: {policy}, {layout}\n\n{_trace_table(group)}" for (policy, layout), group in traced]


def _trace_table(checks: list[dict]) -> str:
    steps = max([STEPS, *(len(check["steps"]) for check in checks)])
    rows = []
    for (stage, quantity), group in _grouped(checks, "stage", "quantity"):
        cells = [_worst_cell([check["steps"][k] for check in group if k < len(check["steps"])]) for k in range(steps)]
        rows.append([stage, quantity, *cells, _bias(group), _status(group)])
    return _table(["stage", "quantity", *(f"step {k + 1}" for k in range(steps)), "bias z", "checks"], rows)


def _worst_cell(ratios: list) -> str:
    worst = max(ratios, key=_rank, default=None)
    return f"**{cell(worst)}**" if _rank(worst) > 1 else cell(worst)


def _bias(checks: list[dict]) -> str:
    return cell(max((check["bias"] for check in checks), key=_rank, default=None))


def _status(checks: list[dict]) -> str:
    """Counts by verdict, never a rate."""
    counts = [(status, sum(check["verdict"] == verdict for check in checks)) for verdict, status in STATUSES.items()]
    return ", ".join(f"{count} {status}" for status, count in counts if count)


def _end_to_end_table(checks: list[dict]) -> str:
    rows = []
    for check in _ran(checks, "end_to_end"):
        where = [check[key] for key in ("policy", "layout")] + [_quantity(check), check["case"]]
        ratio = cell(check["ratio"]) if check["verdict"] == "undecided" else _worst_cell([check["ratio"]])
        rows.append([*where, check["verdict"], ratio, check["message"]])
    columns = ["policy", "layout", "quantity", "case", "verdict", "error/bound", "width or fault"]
    return _section("End to end", _table(columns, rows), rows)


def _ran(checks: list[dict], kind: str) -> list[dict]:
    return [
        check for check in checks if check["kind"] == kind and check["verdict"] not in ("deselected", "not offered")
    ]


def _section(title: str, body: str, rows: list) -> str:
    return f"## {title}\n\n{body}" if rows else ""


def _quantity(check: dict) -> str:
    return ".".join((check["stage"], check["quantity"], check["aspect"]))


def _decision_table(checks: list[dict]) -> str:
    rows = []
    for (policy, stage), group in _grouped(checks, "policy", "stage"):
        total = sum_decisions(group)
        if total:
            illegal = f"**{total['illegal']}**" if total["illegal"] else 0
            rows.append([policy, stage, total["total"], total["flipped"], total["legal"], illegal])
    text = (
        "A decision (expert, MX code, mask) that differs from the oracle's is flipped; legal if its margin allows that."
    )
    return _section("Decisions", f"{text}\n\n" + _table(["policy", "stage", *DECISIONS], rows), rows)


def _stage_table(checks: list[dict]) -> str:
    checks = _ran(checks, "stage")
    policies = list(dict.fromkeys(check["policy"] for check in checks))
    rows = []
    for (stage, quantity, aspect), group in _grouped(checks, "stage", "quantity", "aspect"):
        ratios = [_worst_cell([check["ratio"] for check in group if check["policy"] == policy]) for policy in policies]
        rows.append([stage, quantity, aspect, *ratios, _bias(group), _status(group)])
    return _section("Stages", _table(["stage", "quantity", "aspect", *policies, "bias z", "checks"], rows), rows)


def _not_offered(checks: list[dict]) -> str:
    absent = [check for check in checks if check["verdict"] == "not offered"]
    rows = [[stage, message, len(group)] for (stage, message), group in _grouped(absent, "stage", "message")]
    return _section("Not offered", _table(["stage", "why", "checks"], rows), rows)


def _findings(results: dict) -> str:
    found = faults(results["checks"])
    if not found:
        return ""
    full = [_finding(check, repeat(check, results)) for check in found[:FINDINGS_IN_FULL]]
    rest = [f"- `{check['id']}`: {_escape(measure(check))}" for check in found[FINDINGS_IN_FULL:]]
    note = "In data order; the first is the one to look at."
    return "\n\n".join(["## Findings", note, *full, "\n".join(rest)]).rstrip()


def _finding(check: dict, command: str) -> str:
    lines = [f"### {_escape(blame(check))}", "", _escape(check["message"]), "", f"- check: `{check['id']}`"]
    lines += [f"- {key}: {_show(value)}" for key, value in (check["worst"] or {}).items() if value is not None]
    if check["bias"] is not None:
        lines.append(f"- signed bias: z = {cell(check['bias'])}")
    return "\n".join([*lines, f"- repeat: `{command}`"])


def _grouped(checks: list[dict], *keys: str):
    """Groups by these keys, in the order in which they first appear."""
    groups = defaultdict(list)
    for check in checks:
        groups[tuple(check[key] for key in keys)].append(check)
    return list(groups.items())


def _table(columns: list[str], rows: list) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_escape(str(item)) for item in line) + " |" for line in lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
