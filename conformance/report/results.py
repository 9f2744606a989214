"""The outcome of a run as one dictionary, from which terminal, results.json and REPORT.md are all rendered."""

import math
from collections.abc import Container

from ..protocol.plain import number, plain
from .fingerprint import subject_hash, suite
from .repeat import repeat
from .schema import validate, validate_check

STATUSES = {
    "pass": "passed",
    "fail": "failed",
    "undecided": "undecided",
    "not offered": "not offered",
    "error": "errors",
    "crash": "crashes",
    "timeout": "timeouts",
    "known deviation": "known deviations",
    "lost": "lost",
    "deselected": "deselected",
}
FAULTS = ("fail", "error", "crash", "timeout")
EXECUTED = ("pass", "undecided", "known deviation", *FAULTS)
ABOUT = ("id", "kind", "stage", "quantity", "aspect", "case", "layout", "policy", "order")
EMPTY = {
    "verdict": "lost", "ratio": None, "steps": [], "worst": None, "bias": None, "compared": 0, "decisions": None,
    "first_step": None, "message": "",
}  # fmt: skip
DECISIONS = ("total", "flipped", "legal", "illegal")
KEPT = 40  # faults of a run whose operands are kept, the first in data order
IN_PROCESS = {"isolated": False, "python": None, "timeout": None, "memory": None, "options": ""}


def clean(outcome: dict, check: dict) -> dict:
    """An outcome with every key, in JSON's types; what a check reports beyond the known keys is kept under ``extra``.

    Raises ValueError for one that results.schema.json refuses. ``check`` is what ``about`` says of it.
    """
    outcome = plain(outcome)
    known = EMPTY | {"verdict": None} | {key: value for key, value in outcome.items() if key in EMPTY}
    cleaned = known | {"extra": {key: value for key, value in outcome.items() if key not in EMPTY}}
    validate_check(check | cleaned)
    if cleaned["verdict"] in ("lost", "deselected", "known deviation"):
        raise ValueError(f"outcome.verdict is {cleaned['verdict']!r}, which is not for a check to say")
    return cleaned


def about(check) -> dict:
    """What identifies a check, in JSON's types."""
    return {key: plain(getattr(check, key)) for key in ABOUT}


def build(*, plan: list[dict], outcomes: dict, selected, subject: dict, adapter: str, seed: int, env: dict,
          selection: dict, problems=(), notes=(), isolation=None, deviations=None) -> dict:  # fmt: skip
    """The results of a run. ``plan`` holds ``about`` of every planned check, ``outcomes`` what came back, by id.

    ``isolation`` is what protocol.limits.Limits says of itself; ``deviations`` judges the entries of a file.
    """
    isolation = isolation or IN_PROCESS
    checks = [entry | _outcome(entry["id"], outcomes, selected) for entry in plan]
    results = {
        "schema": 1,
        "suite": suite(),
        "subject": _subject(adapter, plain(subject), isolation),
        "environment": env,
        "seed": seed,
        "selection": {**selection, "selected": len(selected)},
        "isolation": isolation,
        "counts": _counts(checks),
        "compared": sum(check["compared"] for check in checks),
        "decisions": sum_decisions(checks),
        "problems": [*problems, *(deviations.faults(checks) if deviations else ())],
        "notes": list(notes),
        "checks": checks,
    }
    _keep_some_operands(results)
    results |= {"complete": _complete(results), "verdict": _verdict(results), "first_fault": _first_fault(results)}
    validate(results)
    return results


def _outcome(check_id: str, outcomes: dict, selected: Container[str]) -> dict:
    """What came back for a check; what its absence means, if nothing did."""
    default = "lost" if check_id in selected else "deselected"
    outcome = outcomes.get(check_id) or EMPTY | {"verdict": default, "extra": {}}
    if outcome["verdict"] == "lost":
        return outcome | {"message": outcome["message"] or "no result came back"}
    return outcome


def _subject(adapter: str, subject: dict, isolation: dict) -> dict:
    """What was judged, with its hash where there is a file to be hashed."""
    code = subject_hash(adapter, subject["version"], elsewhere=isolation["python"] is not None)
    return {"adapter": adapter} | subject | ({"hash": code} if code else {})


def _keep_some_operands(results: dict) -> None:
    """Those of the first faults in data order: a run in which everything fails must not fill a disk."""
    kept = {check["id"] for check in faults(results)[:KEPT]}
    for check in results["checks"]:
        if check["worst"] and check["id"] not in kept and "operands" in check["worst"]:
            check["worst"] = {key: value for key, value in check["worst"].items() if key != "operands"}


def _counts(checks: list[dict]) -> dict:
    counts = {status: sum(check["verdict"] == verdict for check in checks) for verdict, status in STATUSES.items()}
    executed = sum(counts[STATUSES[verdict]] for verdict in EXECUTED)
    return {"planned": len(checks), "executed": executed} | counts


def sum_decisions(checks: list[dict]) -> dict | None:
    counted = [check["decisions"] for check in checks if check["decisions"]]
    return {key: sum(each[key] for each in counted) for key in DECISIONS} if counted else None


def _complete(results: dict) -> bool:
    counts, selection = results["counts"], results["selection"]
    narrowed = selection["stage"] is not None or selection["policy"] is not None
    return not (narrowed or counts["lost"] or counts["deselected"] or not counts["executed"])


def _verdict(results: dict) -> str:
    counts = results["counts"]
    if any(counts[STATUSES[verdict]] for verdict in FAULTS) or results["problems"]:
        return "fault found"
    if counts["lost"]:
        return "checks lost"
    return "no fault found" if counts["executed"] else "nothing checked"


def faults(results: dict) -> list[dict]:
    """Failing checks, the first in data order first: the walk before single stages before end to end.

    Where several policies show the same fault, the one that the adapter lists first.
    """
    policies = list(results["subject"]["policies"])
    failing = [check for check in results["checks"] if check["verdict"] in FAULTS]
    return sorted(failing, key=lambda check: (_data_order(check), policies.index(check["policy"])))


def _data_order(check: dict) -> tuple:
    """By kind, then by the rank that the walk gave the first faulty edge, or one made alike from its place."""
    kind = ("trace", "stage", "end_to_end").index(check["kind"])
    direction, *rest = check["order"] or (0,)
    step = check["first_step"] or 0
    backward = isinstance(direction, int | float) and direction > 0  # there the last step comes first
    return kind, _sortable(check["extra"].get("rank") or [direction, -step if backward else step, *rest])


def _sortable(part):
    """Numbers before strings, item by item, so that any two sort keys compare."""
    if isinstance(part, list | tuple):
        return (2, tuple(_sortable(item) for item in part))
    return (1, part) if isinstance(part, str) else (0, part)


def _first_fault(results: dict) -> dict | None:
    for check in faults(results)[:1]:
        command = repeat(check, results)
        return {"id": check["id"], "sentence": f"First fault: {blame(check)}. Repeat: {command}", "repeat": command}
    return None


def blamed_stage(check: dict) -> str:
    """The stage at fault: what the walk says; where the whole unroll raised or ended, no stage of it."""
    alone = check["stage"] if check["kind"] != "trace" or check["verdict"] == "fail" else "unroll"
    return check["extra"].get("blamed") or alone


def blame(check: dict) -> str:
    """Step, stage and size of a fault in one line."""
    step = f"step {check['first_step']}, " if check["first_step"] else ""
    blamed, where = blamed_stage(check), check["quantity"]
    if blamed != check["stage"] and check["verdict"] == "fail":  # a consumer's vector-Jacobian product is wrong
        where = f"backward, seen in the {where} of {check['stage']}"
    return f"{step}stage {blamed} ({where}): {measure(check)} [{label(check)}]"


def label(check: dict) -> str:
    """Layout, policy and case, as in the id."""
    return check["id"].rpartition("[")[2].removesuffix("]")


def measure(check: dict) -> str:
    """How wrong it is: the error over its bound, and what the walk adds to that; else the message."""
    ratio = number(check["ratio"])
    if check["verdict"] in ("error", "crash", "timeout") or ratio is None or ratio <= 1 or not math.isfinite(ratio):
        return check["message"].rstrip(".") or f"{check['verdict']}, ratio {ratio}"
    blamed = check["message"].partition("; ")[2]
    return f"error {ratio:.3g} x its bound" + (f"; {blamed}" if blamed else "")
