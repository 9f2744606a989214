"""What differs between two runs: for --compare, in the terminal, REPORT.md and the HTML page."""

import json
from pathlib import Path

from .results import FAULTS, measure
from .text import cell, rank

MOVED = 2.0  # a ratio that changed by more than this factor is worth a line
SLIGHT = 0.01  # below this a ratio says only that all is well, and by how much is noise
HEADINGS = {
    "failing": "Newly failing",
    "fixed": "Fixed",
    "verdict": "Another verdict",
    "moved": "Error over bound moved by more than a factor of 2",
    "added": "Checks added",
    "removed": "Checks removed",
}


def read(path) -> dict:
    """Results of an earlier run. Raises ValueError with a sentence for a file that holds none."""
    path = Path(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    from .schema import validate

    try:
        validate(results)
    except ValueError as error:
        raise ValueError(f"{path} holds no results of this suite: {error}") from error
    return results


def changes(old: dict, new: dict) -> dict:
    """Every check that another answer came back for, by kind of change; and what may explain it."""
    before, after = ({c["id"]: c for c in results["checks"] if c["verdict"] != "deselected"} for results in (old, new))
    narrowed = any(new["selection"][key] for key in ("stage", "policy")) or new["counts"]["deselected"]
    found = {name: [] for name in HEADINGS}
    for name, check in after.items():
        if name not in before:
            found["added"].append({"id": name, "was": None, "is": told(check)})
        elif kind := kind_of_change(before[name], check):
            found[kind].append({"id": name, "was": told(before[name]), "is": told(check)})
    for name, check in before.items():
        if name not in after and not narrowed:
            found["removed"].append({"id": name, "was": told(check), "is": None})
    return {"notes": notes(old, new), **found}


def kind_of_change(was: dict, now: dict) -> str | None:
    faulty = [check["verdict"] in FAULTS for check in (was, now)]
    if faulty[0] != faulty[1]:
        return "failing" if faulty[1] else "fixed"
    if was["verdict"] != now["verdict"]:
        return "verdict"
    return "moved" if ratio_moved(was["ratio"], now["ratio"]) else None


def ratio_moved(was, now) -> bool:
    if was is None or now is None:
        return (was is None) != (now is None)
    low, high = sorted((max(rank(was), SLIGHT), max(rank(now), SLIGHT)))
    return high > MOVED * low


def told(check: dict) -> str:
    """A verdict, with its number or its reason."""
    if check["verdict"] in FAULTS:
        return f"{check['verdict']}, {measure(check)}"
    return check["verdict"] if check["ratio"] is None else f"{check['verdict']} at {cell(check['ratio'])}"


def notes(old: dict, new: dict) -> list[str]:
    """Differences of the runs themselves."""
    about = {
        "adapter": lambda r: r["subject"]["adapter"],
        "version": lambda r: f"{r['subject']['name']} {r['subject']['version']}".strip(),
        "subject": lambda r: r["subject"].get("hash") or "no hash",
        "suite": lambda r: f"{r['suite']['version']} ({r['suite']['hash']})",
        "seed": lambda r: r["seed"],
        "stages": lambda r: r["selection"]["stage"] or "all",
        "policies": lambda r: r["selection"]["policy"] or "all",
        "python": lambda r: r["environment"]["python"],
        "numpy": lambda r: r["environment"]["numpy"],
        "torch": lambda r: r["environment"]["torch"] or "not loaded",
    }
    pairs = ((name, said(old), said(new)) for name, said in about.items())
    return [f"{name}: {was} before, {now} now" for name, was, now in pairs if was != now]


def sections(found: dict) -> list[tuple[str, list[str]]]:
    """Headings with a line for each check, empty ones left out."""
    return [(head, [line(entry) for entry in found[name]]) for name, head in HEADINGS.items() if found[name]]


def line(entry: dict) -> str:
    was, now = entry["was"], entry["is"]
    if was is None or now is None:
        return f"{entry['id']}: {now or was}"
    return f"{entry['id']}: {was}, now {now}"


def counted(found: dict) -> str:
    """One sentence for the terminal."""
    parts = [f"{len(found[name])} {word}" for name, word in (
        ("failing", "newly failing"), ("fixed", "fixed"), ("verdict", "with another verdict"), ("moved", "moved"),
        ("added", "added"), ("removed", "removed")) if found[name]]  # fmt: skip
    return ", ".join(parts) or "nothing has changed"
