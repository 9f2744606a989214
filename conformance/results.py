"""The outcome of a run as one dictionary, from which terminal, results.json and REPORT.md are all rendered."""

import hashlib
import json
import math
import platform
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from draftconf import __version__

KINDS = {
    "stage": "conformance/test_stages.py::test_stage",
    "trace": "conformance/test_trace.py::test_trace",
    "end_to_end": "conformance/test_end_to_end.py::test_end_to_end",
}
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
#: Modules that a verdict hangs on.
DECIDING = ("stages", "losses", "pattern", "cases", "checks", "check_*", "compare", "decisions", "trace", "outcome")
ABOUT = ("id", "kind", "stage", "quantity", "aspect", "case", "layout", "policy", "order")
EMPTY = {
    "verdict": "lost", "ratio": None, "steps": [], "worst": None, "bias": None, "compared": 0, "decisions": None,
    "first_step": None, "message": "",
}  # fmt: skip
DECISIONS = ("total", "flipped", "legal", "illegal")
CONFORM = "conform"
VECTORS = "conform vectors check "
KEPT = 40  # faults of a run whose operands are kept, the first in data order
IN_PROCESS = {"isolated": False, "python": None, "timeout": None, "memory": None, "options": ""}


def plain(value):
    """``value`` in JSON's own types: NumPy scalars and arrays unpacked, numbers that are not finite as strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def number(value) -> float | None:
    """A ratio as ``plain`` wrote it, as a number again."""
    return float(value) if isinstance(value, str) else value


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


def environment(subject=None) -> dict:
    """Versions that can change a result. torch only if something has imported it.

    Of an adapter in a process of its own they are the versions there; where the suite's differ, they stand beside them.
    """
    own = {"python": platform.python_version(), "numpy": version("numpy"), "torch": torch_version()}
    there = getattr(subject, "versions", None)
    if there is None:
        return own
    return there | {f"suite's {name}": own[name] for name in ("python", "numpy") if own[name] != there[name]}


def torch_version() -> str | None:
    try:
        return version("torch") if "torch" in sys.modules else None
    except PackageNotFoundError:
        return "unknown"


def suite() -> dict:
    """Version of the suite, and a hash of all that decides a verdict: stages, cases, checks and the oracle."""
    from .adapter import PROTOCOL

    return {"version": __version__, "hash": content_hash(Path(__file__).parents[1]), "protocol": PROTOCOL}


@cache
def content_hash(root: Path) -> str:
    sources = [path for name in DECIDING for path in sorted((root / "conformance").glob(f"{name}.py"))]
    digest = hashlib.sha256()
    for source in [*sources, *sorted((root / "reference").glob("*.py"))]:
        text = source.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{source.parent.name}/{source.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]


def module_of(test: str) -> str:
    """The name that pytest's --pyargs takes for a test function of a file of the checkout."""
    return f"draftconf.{test.replace('.py', '').replace('/', '.')}"


def repeat_command(
    check: dict, adapter: str, seed: int, pyargs: bool = False, options: str = "", started_by: str = "pytest"
) -> str:
    """A shell command that runs just this check, in a checkout or, with ``pyargs``, where the suite is installed.

    ``options`` are those of the run that bear on the verdict, as they were given; ``started_by`` is pytest or conform.
    """
    if adapter.startswith(VECTORS):  # a program's files, read without pytest
        return f"{adapter} --check {shlex.quote(check['id'])}"
    if started_by == CONFORM:
        command = f"conform run {shlex.quote(adapter)} --check {shlex.quote(check['id'])} --seed {seed}"
        return f"{command} {options}".strip()
    test = KINDS[check["kind"]]
    if pyargs:
        test = module_of(test)
    node = shlex.quote(f"{test}[{check['id']}]")
    command = f"pytest {'--pyargs ' if pyargs else ''}{node} --adapter {shlex.quote(adapter)} --seed {seed}"
    return f"{command} {options}".strip()


def repeat(check: dict, results: dict) -> str:
    """The same, the way that this run was started."""
    selection, options = results["selection"], results["isolation"]["options"]
    way = {"pyargs": selection["pyargs"], "started_by": selection.get("started_by", "pytest")}
    return repeat_command(check, results["subject"]["adapter"], results["seed"], options=options, **way)


def build(*, plan: list[dict], outcomes: dict, selected, subject: dict, adapter: str, seed: int, env: dict,
          selection: dict, problems=(), notes=(), isolation=None, deviations=None) -> dict:  # fmt: skip
    """The results of a run. ``plan`` holds ``about`` of every planned check, ``outcomes`` what came back, by id.

    ``isolation`` is what conformance.limits.Limits says of itself; ``deviations`` judges the entries of a file.
    """
    checks = []
    for entry in plan:
        default = "lost" if entry["id"] in selected else "deselected"
        outcome = outcomes.get(entry["id"]) or EMPTY | {"verdict": default, "extra": {}}
        if outcome["verdict"] == "lost":
            outcome = outcome | {"message": outcome["message"] or "no result came back"}
        checks.append(entry | outcome)
    results = {
        "schema": 1,
        "suite": suite(),
        "subject": {"adapter": adapter} | plain(subject),
        "environment": env,
        "seed": seed,
        "selection": {**selection, "selected": len(selected)},
        "isolation": isolation or IN_PROCESS,
        "counts": _counts(checks),
        "compared": sum(check["compared"] for check in checks),
        "decisions": sum_decisions(checks),
        "problems": [*problems, *(deviations.faults(checks) if deviations else ())],
        "notes": list(notes),
        "checks": checks,
    }
    _keep_some_operands(results)
    results["complete"] = _complete(results)
    results["verdict"] = _verdict(results)
    results["first_fault"] = _first_fault(results)
    validate(results)
    return results


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
    found = [check["decisions"] for check in checks if check["decisions"]]
    return {key: sum(each[key] for each in found) for key in DECISIONS} if found else None


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
    blamed, seen = blamed_stage(check), check["quantity"]
    if blamed != check["stage"] and check["verdict"] == "fail":  # a consumer's vector-Jacobian product is wrong
        seen = f"backward, seen in the {seen} of {check['stage']}"
    return f"{step}stage {blamed} ({seen}): {measure(check)} [{label(check)}]"


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


# -- results.schema.json ---------------------------------------------------------------------------------------------

TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def validate(results: dict) -> None:
    """Check against results.schema.json: the part of JSON schema that it uses. Raises ValueError naming the place."""
    _validate(results, _schema(), _schema()["$defs"], "results")


def validate_against(value, schema: dict, where: str) -> None:
    """The same for another schema that uses no more than that part."""
    _validate(value, schema, schema["$defs"], where)


def validate_check(check: dict) -> None:
    """The same for one entry of ``checks``."""
    _validate(check, _schema()["properties"]["checks"]["items"], _schema()["$defs"], "outcome")


@cache
def _schema() -> dict:
    return json.loads(Path(__file__).with_name("results.schema.json").read_text(encoding="utf-8"))


def _validate(value, schema: dict, definitions: dict, where: str) -> None:
    if "$ref" in schema:
        _validate(value, definitions[schema["$ref"].rpartition("/")[2]], definitions, where)
    if "anyOf" in schema and not any(_fits(value, option, definitions) for option in schema["anyOf"]):
        raise ValueError(f"{where} is {value!r}, which fits no alternative of its schema")
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and value not in allowed:
        raise ValueError(f"{where} is {value!r}; wanted one of {allowed}")
    if "type" in schema:
        _check_type(value, schema["type"], where)
    if isinstance(value, dict):
        _check_object(value, schema, definitions, where)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            _validate(item, schema["items"], definitions, f"{where}[{index}]")


def _check_type(value, names, where: str) -> None:
    names = [names] if isinstance(names, str) else names
    if not any(isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in names):
        raise ValueError(f"{where} is {value!r}; wanted {' or '.join(names)}")


def _check_object(value: dict, schema: dict, definitions: dict, where: str) -> None:
    missing = [name for name in schema.get("required", ()) if name not in value]
    unknown = [name for name in value if name not in schema.get("properties", {})]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}")
    if unknown and schema.get("additionalProperties") is False:
        raise ValueError(f"{where} has {unknown[0]}, which its schema does not know")
    for name, item in value.items():
        if name in schema.get("properties", {}):
            _validate(item, schema["properties"][name], definitions, f"{where}.{name}")


def _fits(value, schema: dict, definitions: dict) -> bool:
    try:
        _validate(value, schema, definitions, "")
    except ValueError:
        return False
    return True
