"""REPORT.md: one page with every stage and quantity, from the results alone."""

from collections import defaultdict
from pathlib import Path

from ..judging import operands
from .repeat import repeat
from .results import DECISIONS, STATUSES, blame, faults, measure, sum_decisions
from .text import cell, closing, numbers, pairs, rank, show, title, worst_check

FINDINGS_IN_FULL = 40
OPERANDS_LISTED = 40
CHANGES_LISTED = 200
ENDED = ("error", "timeout", "crash")
GRAVITY = ("not offered", "deselected", "pass", "undecided", "known deviation", "lost", "fail", *ENDED)
STEPS = 7


def markdown(results: dict, changes: dict | None = None) -> str:
    """The same text for the same results: no dates, no durations. ``changes`` are those since an earlier run."""
    subject = results["subject"]
    checks = _placed(results["checks"], subject)
    parts = [
        f"# Conformance report: {title(subject)}",
        f"**{_verdict_line(results)}**",
        _overview(results),
        _changes(changes),
        "Numbers are error over bound: at most 1 conforms, more is **bold**, `-` was not measured. Each is the worst "
        "over the cases and elements of its row.",
        *_walk_tables(checks),
        _parameter_table(checks),
        *_end_to_end_tables(checks),
        _decision_table(checks),
        _stage_table(checks),
        _not_offered(checks),
        _known_deviations(checks),
        _findings(results),
        _power(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _placed(checks: list[dict], subject: dict) -> list[dict]:
    """With the place of policy and layout in the adapter's own order. Rows follow the plan, columns and tables this."""
    policies, layouts = list(subject["policies"]), list(subject["layouts"])
    places = ((policies.index(check["policy"]), layouts.index(check["layout"])) for check in checks)
    return [check | {"place": place} for check, place in zip(checks, places, strict=True)]


def _by_place(checks: list[dict]) -> list[dict]:
    return sorted(checks, key=lambda check: check["place"])


def _verdict_line(results: dict) -> str:
    first = results["first_fault"]
    if first is None:
        return escape(closing(results))
    check = next(check for check in results["checks"] if check["id"] == first["id"])
    return escape(f"Fault found. First fault: {blame(check)}.")


def _overview(results: dict) -> str:
    subject, about, counts, selection = (results[key] for key in ("subject", "suite", "counts", "selection"))
    narrowed = [f"--{name} {selection[name]}" for name in ("stage", "policy") if selection[name]]
    rows = [("adapter", f"`{subject['adapter']}`"), ("url", subject["url"])]
    rows += [(f"formats of policy {name}", pairs(formats)) for name, formats in subject["policies"].items()]
    rows += [
        ("choices that differ from the default", pairs(subject["choices"]) or "none"),
        ("layouts", ", ".join(subject["layouts"])),
        ("offers", ", ".join(subject["offers"]) or "nothing"),
        ("suite", f"{about['version']}, content {about['hash']}, protocol {about['protocol']}"),
        ("subject", f"content {subject['hash']}" if "hash" in subject else ""),
        ("seed", results["seed"]),
        ("versions", ", ".join(f"{name} {value}" for name, value in results["environment"].items() if value)),
        ("process of its own", _isolation(results["isolation"])),
        ("narrowed by", ", ".join(narrowed)),
        *((name, counts[name]) for name in counts),
        ("complete", "yes" if results["complete"] else "no"),
        ("elements compared", results["compared"]),
        ("worst error/bound", _worst(results["checks"])),
        *(("problem", problem) for problem in results["problems"]),
        *(("note", note) for note in results["notes"]),
    ]
    return table(["", ""], [row for row in rows if row[1] != ""])


def _changes(changes: dict | None) -> str:
    """What an earlier run had otherwise."""
    if changes is None:
        return ""
    from .changes import counted, sections

    parts = [
        f"{counted(changes)[0].upper()}{counted(changes)[1:]}.",
        *(f"- {escape(note)}" for note in changes["notes"]),
    ]
    for head, entries in sections(changes):
        listed = [f"- {escape(entry)}" for entry in entries[:CHANGES_LISTED]]
        more = [f"- and {len(entries) - CHANGES_LISTED} more"] * (len(entries) > CHANGES_LISTED)
        parts += [f"\n### {head}: {len(entries)}\n", *listed, *more]
    return _section("Since the earlier run", "\n".join(parts))


def _isolation(isolation: dict) -> str:
    if not isolation["isolated"]:
        return ""
    python = f"`{isolation['python']}`, " if isolation["python"] else ""
    memory = f"{isolation['memory']:g} GiB" if isolation["memory"] else "as much memory as there is"
    return f"{python}{isolation['timeout']:g} s a call, {memory}"


def _worst(checks: list[dict]) -> str:
    worst = worst_check(checks)
    return f"{cell(worst['ratio'])} in `{worst['id']}`" if worst else ""


def _walk_tables(checks: list[dict]) -> list[str]:
    """A row for each stage and quantity, a column for each step; one table for each policy and layout."""
    edges = [check for check in _ran(checks, "trace") if check["quantity"] != "gradient"]
    tables = _grouped(_by_place(edges), "policy", "layout")
    return [_section(f"The walk: {' '.join(at)}", _walk_table(group)) for at, group in tables]


def _walk_table(checks: list[dict]) -> str:
    steps = max([STEPS, *(len(check["steps"]) for check in checks)])
    rows = []
    for (stage, quantity), group in _grouped(checks, "stage", "quantity"):
        ratios = [[check["steps"][k] for check in group if k < len(check["steps"])] for k in range(steps)]
        rows.append([stage, quantity, *map(_bold_above_one, ratios), _bias(group), _status(group)])
    return table(["stage", "quantity", *(f"step {k + 1}" for k in range(steps)), "bias z", "checks"], rows)


def _bold_above_one(ratios: list) -> str:
    worst = max(ratios, key=rank, default=None)
    return f"**{cell(worst)}**" if rank(worst) > 1 else cell(worst)


def _parameter_table(checks: list[dict]) -> str:
    """The walk's parameter gradients: sums over the steps, so one number each."""
    gradients = [check for check in _ran(checks, "trace") if check["quantity"] == "gradient"]
    return _section("The walk: parameter gradients", _matrix(gradients, "stage", ("policy", "layout")))


def _end_to_end_tables(checks: list[dict]) -> list[str]:
    tables = _grouped(_by_place(_ran(checks, "end_to_end")), "policy", "layout")
    return [_section(f"End to end: {' '.join(at)}", _matrix(group, "quantity", ("case",))) for at, group in tables]


def _matrix(checks: list[dict], row: str, columns: tuple) -> str:
    """One cell for each combination of ``row`` with ``columns``."""
    across = [key for key, _ in _grouped(_by_place(checks), *columns)]
    lines = []
    for (name,), group in _grouped(checks, row):
        cells = (_cell_of([check for check in group if tuple(check[c] for c in columns) == key]) for key in across)
        lines.append([name, *cells])
    return table([row, *map(" ".join, across)], lines) if lines else ""


def _cell_of(checks: list[dict]) -> str:
    """The gravest verdict among these checks and the number that belongs to it."""
    worst = max(checks, key=lambda check: (GRAVITY.index(check["verdict"]), rank(check["ratio"])), default=None)
    if worst is None:
        return ""
    if worst["verdict"] == "undecided":
        width = worst["extra"].get("width")
        return "undecided" if width is None else f"undecided, {cell(width)} wide"
    if worst["verdict"] in ("lost", *ENDED):
        return f"**{worst['verdict']}**"
    if worst["verdict"] == "known deviation":
        return "known deviation" if worst["ratio"] is None else f"known deviation, {cell(worst['ratio'])}"
    if worst["verdict"] == "fail":
        return f"**{cell(worst['ratio'])}**" if rank(worst["ratio"]) > 1 else "**fail**"
    judged, of = worst["extra"].get("judged", (0, 0))
    return cell(worst["ratio"]) + (f", {judged} of {of} steps" if judged < of else "")


def _bias(checks: list[dict]) -> str:
    return cell(max((check["bias"] for check in checks), key=rank, default=None))


def _status(checks: list[dict]) -> str:
    """Counts by verdict, never a rate."""
    counts = [(status, sum(check["verdict"] == verdict for check in checks)) for verdict, status in STATUSES.items()]
    return ", ".join(f"{count} {status}" for status, count in counts if count)


def _ran(checks: list[dict], kind: str) -> list[dict]:
    return [
        check for check in checks if check["kind"] == kind and check["verdict"] not in ("deselected", "not offered")
    ]


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


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
    return _section("Decisions", f"{text}\n\n" + table(["policy", "stage", *DECISIONS], rows)) if rows else ""


def _stage_table(checks: list[dict]) -> str:
    checks = _ran(checks, "stage")
    policies = [policy for (policy,), _ in _grouped(_by_place(checks), "policy")]
    rows = []
    for (stage, quantity), group in _grouped(checks, "stage", "quantity"):
        cells = [_cell_of([check for check in group if check["policy"] == policy]) for policy in policies]
        rows.append([stage, quantity, *cells, _bias(group), _status(group)])
    return _section("Stages", table(["stage", "quantity", *policies, "bias z", "checks"], rows)) if rows else ""


def _not_offered(checks: list[dict]) -> str:
    absent = [check for check in checks if check["verdict"] == "not offered"]
    rows = [[stage, message, len(group)] for (stage, message), group in _grouped(absent, "stage", "message")]
    return _section("Not offered", table(["stage", "why", "checks"], rows)) if rows else ""


def _known_deviations(checks: list[dict]) -> str:
    rows = []
    for check in checks:
        if check["verdict"] == "known deviation":
            entry = check["extra"]["deviation"]
            expected = " to ".join(entry["ratio"]) if entry["ratio"] else "-"
            rows.append([f"`{check['id']}`", entry["kind"], cell(check["ratio"]), expected,
                         entry["reason"], entry["url"], entry["until"]])  # fmt: skip
    text = "Faults that the deviations file describes. They are no passes; outside its ranges they count as any other."
    columns = ["check", "kind", "ratio", "expected", "reason", "url", "until"]
    return _section("Known deviations", f"{text}\n\n" + table(columns, rows)) if rows else ""


def _findings(results: dict) -> str:
    found = faults(results)
    if not found:
        return ""
    full = [_finding(check, repeat(check, results)) for check in found[:FINDINGS_IN_FULL]]
    full[0] += _operands(found[0])
    rest = [f"- `{check['id']}`: {escape(measure(check))}" for check in found[FINDINGS_IN_FULL:]]
    note = "In data order; the first is the one to look at."
    return "\n\n".join(["## Findings", note, *full, "\n".join(rest)]).rstrip()


def _finding(check: dict, command: str) -> str:
    lines = [f"### {escape(blame(check))}", "", escape(check["message"]), "", f"- check: `{check['id']}`"]
    lines += [f"- {key}: {show(value)}" for key, value in numbers(check["worst"] or {})]
    if check["bias"] is not None:
        lines.append(f"- signed bias: z = {cell(check['bias'])}")
    return "\n".join([*lines, f"- repeat: `{command}`"])


def _operands(check: dict) -> str:
    """What the expected value of the first fault was made of."""
    found = (check["worst"] or {}).get("operands", [])
    rows = [[operands.title(each), *line] for each in found for line in operands.lines(each)]
    left = [f"and {len(rows) - OPERANDS_LISTED} more in the results file"] * (len(rows) > OPERANDS_LISTED)
    shown = table(["operand", "index", "decimal", "hexadecimal"], rows[:OPERANDS_LISTED])
    return "\n\n" + "\n\n".join([shown, *left]) if rows else ""


def _grouped(checks: list[dict], *keys: str):
    """Groups by these keys, in the order in which they first appear."""
    groups = defaultdict(list)
    for check in checks:
        groups[tuple(check[key] for key in keys)].append(check)
    return list(groups.items())


def table(columns: list[str], rows: list) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(escape(str(item)) for item in line) + " |" for line in lines)


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _power() -> str:
    """What `make power` last measured of the suite itself; the whole kill table is POWER.md."""
    measured = Path(__file__).parents[1] / "evidence" / "measured_power.md"
    if not measured.exists():
        return ""
    lead = "Planted faults that this suite catches, and honest implementations that it lets pass: POWER.md has each."
    return f"## Power of the suite\n\n{lead}\n\n{measured.read_text(encoding='utf-8').rstrip()}"
