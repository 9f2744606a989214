"""Renderings of the results: terminal lines, results.json and REPORT.md. Nothing here decides anything."""

import json
import os
from pathlib import Path

from .deviations import VERDICT as DEVIATES
from .results import FAULTS, STATUSES, label, measure, number, suite

# -- terminal --------------------------------------------------------------------------------------------------------


def header(subject: dict, adapter: str, seed: int) -> list[str]:
    about = suite()
    return [
        f"adapter {adapter}: {title(subject)} {subject['url']}".rstrip(),
        f"policies {', '.join(subject['policies'])}; layouts {', '.join(subject['layouts'])}",
        *(f"  {name}: {pairs(formats)}" for name, formats in subject["policies"].items()),
        f"offers {', '.join(subject['offers']) or 'nothing'}",
        f"choices: {pairs(subject['choices']) or 'all default'}",
        f"suite {about['version']} ({about['hash']}), protocol {about['protocol']}, seed {seed}",
    ]


def title(subject: dict) -> str:
    return f"{subject['name']} {subject['version']}".rstrip()


def summary(results: dict, changes: dict | None = None) -> list[str]:
    from .changes import counted
    from .summary import terminal_table

    subject, about, environment = results["subject"], results["suite"], results["environment"]
    lines = [
        f"{title(subject)}; suite {about['version']} ({about['hash']}), seed {results['seed']}; "
        + ", ".join(f"{name} {value}" for name, value in environment.items() if value),
        counts_line(results),
        *terminal_table(results),
    ]
    worst = worst_check(results["checks"])
    if worst:
        lines.append(f"worst error/bound {cell(worst['ratio'])}, in {worst['id']}")
    lost = [check["id"] for check in results["checks"] if check["verdict"] == "lost"]
    if lost:
        lines.append(f"no result came back for {', '.join(lost[:10])}{' and others' if len(lost) > 10 else ''}")
    if changes is not None:
        lines.append(f"since the earlier run: {counted(changes)}")
    return lines + results["problems"] + [f"note: {note}" for note in results["notes"]]


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
    others = ("undecided", "known deviations", "not offered")
    rest = [f"{counts[status]} {status}" for status in others if counts[status]]
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
    lines = [f"{measure(check)} [{label(check)}]", f"  check   {check['id']}"]
    if check["message"]:
        lines.append(f"  what    {check['message']}")
    if check["steps"]:
        lines.append("  step    " + " ".join(f"{step:>8}" for step in range(1, len(check["steps"]) + 1)))
        lines.append("  ratio   " + " ".join(f"{cell(ratio):>8}" for ratio in check["steps"]))
    if check["worst"]:
        lines += [f"  {key:7} {show(value)}" for key, value in numbers(check["worst"])]
    lines += [f"  at      {line}" for line in details.splitlines()]
    return "\n".join([*lines, f"  repeat  {command}"])


def numbers(element: dict) -> list[tuple]:
    """What there is to show of an element in a line each: all but its operands."""
    return [(key, value) for key, value in element.items() if value is not None and key != "operands"]


def worst_check(checks: list[dict]) -> dict | None:
    judged = [check for check in checks if check["verdict"] in ("pass", DEVIATES, *FAULTS)]
    measured = [check for check in judged if check["ratio"] is not None]
    return max(measured, key=lambda check: rank(check["ratio"]), default=None)


def rank(ratio) -> float:
    value = number(ratio)
    return -1.0 if value is None else float("inf") if value != value else value


def cell(ratio) -> str:
    """A ratio to two digits."""
    value = number(ratio)
    if value is None:
        return "-"
    return f"{value:.0f}" if 99.5 <= value < 1e6 else f"{value:.2g}"


def show(value) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def pairs(mapping: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in mapping.items())


# -- files -----------------------------------------------------------------------------------------------------------


def as_json(value: dict) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def as_markdown(results: dict, changes: dict | None = None) -> str:
    from .markdown import markdown

    return markdown(results, changes)


def as_html(results: dict, changes: dict | None = None) -> str:
    from .html import html

    return html(results, changes)


def write_json(results: dict, path) -> None:
    write(path, as_json(results))


def write_markdown(results: dict, path) -> None:
    write(path, as_markdown(results))


def write(path, text: str) -> None:
    """By renaming, so that a run cut short leaves the old file and never half a new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
