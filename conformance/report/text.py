"""The words of the results, for the terminal and every page: what a run is called, ends with, and shows of a check."""

from ..protocol.plain import number
from .deviations import VERDICT as DEVIATES
from .fingerprint import suite
from .results import FAULTS, STATUSES, label, measure


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
