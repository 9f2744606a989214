"""The short renderings: a job summary for GitHub Actions, a badge, and the table that a terminal run ends with."""

from .changes import counted, sections
from .markdown import table
from .repeat import repeat
from .results import FAULTS, STATUSES, blame, faults
from .text import cell, closing, counts_line, title, worst_check

LINES = 200  # of a job summary at most
FINDINGS = 20
KINDS = {"stage": "stages", "trace": "walk", "end_to_end": "end to end"}
SYMBOL = {"no fault found": "✅", "fault found": "❌", "nothing checked": "⚠️", "checks lost": "⚠️"}
WIDTH = 300  # characters of a line at most


def job_summary(results: dict, changes: dict | None = None) -> str:
    """Status first, at most 200 lines."""
    lines = [f"## {SYMBOL[results['verdict']]} {escape(title(results['subject']))}: {results['verdict']}", ""]
    lines += [_cut(escape(closing(results))), "", *table(*counts(results)).splitlines(), ""]
    found = faults(results)
    if found:
        lines += ["<details open><summary>Findings, the first to look at first</summary>", ""]
        lines += [f"- {_cut(escape(blame(check)))}  \n  `{repeat(check, results)}`" for check in found[:FINDINGS]]
        lines += [f"- and {len(found) - FINDINGS} more"] * (len(found) > FINDINGS) + ["", "</details>", ""]
    if changes is not None:
        lines += [f"Since the earlier run: {counted(changes)}.", "", *_folded(changes)]
    whole = "\n".join(lines).splitlines()
    return "\n".join(whole if len(whole) <= LINES else [*whole[: LINES - 1], "cut here"]) + "\n"


def _folded(changes: dict, each: int = 15) -> list[str]:
    lines = []
    for head, entries in sections(changes):
        lines += [f"<details><summary>{head}: {len(entries)}</summary>", ""]
        lines += [f"- {_cut(escape(entry))}" for entry in entries[:each]]
        lines += [f"- and {len(entries) - each} more"] * (len(entries) > each) + ["", "</details>", ""]
    return lines


def escape(text: str) -> str:
    """Markdown in which names and messages cannot open a tag or a table cell."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def counts(results: dict) -> tuple[list[str], list[list]]:
    """A row for each kind of check and policy: how many by status, and the worst ratio. Head and rows."""
    used = [(verdict, status) for verdict, status in STATUSES.items() if results["counts"][status]]
    rows = []
    for kind, name in KINDS.items():
        for policy in results["subject"]["policies"]:
            checks = [c for c in results["checks"] if c["kind"] == kind and c["policy"] == policy]
            if any(c["verdict"] not in ("not offered", "deselected") for c in checks):
                worst = worst_check(checks)
                numbers = [sum(c["verdict"] == verdict for c in checks) for verdict, _ in used]
                rows.append([name, policy, *numbers, cell(worst["ratio"]) if worst else "-"])
    return ["kind", "policy", *(status for _, status in used), "worst error/bound"], rows


def terminal_table(results: dict) -> list[str]:
    """The same in columns."""
    head, rows = counts(results)
    cells = [[str(c) for c in row] for row in [head, *rows]] if rows else []
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))] if rows else []
    return [
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def badge(results: dict) -> dict:
    """For shields.io's endpoint badge. Numbers are counts; a part of the plan is never green."""
    counts, verdict = results["counts"], results["verdict"]
    if verdict != "no fault found":
        faulty = sum(counts[STATUSES[v]] for v in FAULTS)
        message = f"{faulty} faults" if faulty > 1 else f"{faulty} fault" if faulty else verdict
        return _badge(message, "red" if verdict == "fault found" else "lightgrey")
    parts = [f"{counts['passed']} passed"]
    parts += [f"{counts[s]} {s}" for s in ("undecided", "known deviations") if counts[s]]
    if not results["complete"]:
        return _badge(", ".join(["part of the plan", *parts]), "yellow")
    return _badge(", ".join(parts), "yellow" if counts["known deviations"] else "brightgreen")


def _badge(message: str, colour: str) -> dict:
    return {"schemaVersion": 1, "label": "draft conformance", "message": message, "color": colour}


def summary(results: dict, changes: dict | None = None) -> list[str]:
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
