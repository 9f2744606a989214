"""Running the suite on each adapter of a package, and its finding scripts: one row of the matrix."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..checks.exact import SILENT
from ..protocol.plain import number
from ..report.fingerprint import suite
from ..report.results import FAULTS, STATUSES
from . import scripts
from .environments import Builder, BuildError
from .packages import PACKAGES, Package

QUANTISERS = ("mxfp4", "mxfp8", "fake_mxfp4", "fake_mxfp8")  # what a scale rule bears on
OCP_RULE = "floor"  # OCP MX v1.0, section 6.3
SMALLEST = "; smallest input: "
ELEMENT = ("step", "index", "actual", "expected", "error", "bound", "actual_hex", "expected_hex")
KEPT = ("id", "verdict", "ratio", "worst", "first_step", "message")


@dataclass(frozen=True)
class Runner:
    """Runs packages from the checkout at ``root``; results go to ``out``. ``stage`` and ``workers`` as in pytest."""

    root: Path
    builder: Builder
    out: Path
    stage: str | None = None
    workers: int = 0
    packages: tuple = PACKAGES
    findings: Path = scripts.FOLDER

    def row(self, package: Package) -> dict:
        """All that the matrix says of a package. A package that cannot be run has a row that says why."""
        row = {"name": package.name, "documented": package.documented, "bases": list(package.bases), "message": "",
               "variables": package.variables, "suite": {k: suite()[k] for k in ("version", "hash")},
               "stage": self.stage, "adapters": [], "findings": [], "unexplained": []}  # fmt: skip
        findings = scripts.scripts_of(package, self.packages, self.findings)
        try:
            place = self.builder.build(package)
        except BuildError as error:
            return row | {"message": str(error)}
        row["adapters"] = [self._adapter(package, adapter, place) for adapter in package.adapters]
        ran = [script_entry(each, scripts.run(each, place, package.variables)) for each in findings]
        return row | grouped(row["adapters"], list(zip(findings, ran, strict=True)))

    def _adapter(self, package: Package, adapter: str, place: Path) -> dict:
        results = self.out / package.name / f"{''.join(c if c.isalnum() else '_' for c in adapter)}.json"
        results.parent.mkdir(parents=True, exist_ok=True)
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "conformance/", "-q", "--tb=no", "--adapter", adapter,
                   "--adapter-python", str(place), "--results", str(results.resolve())]  # fmt: skip
        command += [*(["--stage", self.stage] if self.stage else []), *(["-n", str(self.workers)] * bool(self.workers))]
        variables = {**os.environ, **scripts.OFFLINE, **package.variables}
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.root, env=variables)
        if not results.is_file():
            return {"adapter": adapter, "message": reason(done)}
        return compact(adapter, json.loads(results.read_text(encoding="utf-8")))


def reason(done) -> str:
    """Why pytest left no results: the sentence that it ended with."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if "cannot be loaded" in line or line.startswith("ERROR")] or lines[-1:]
    return (errors[0].removeprefix("ERROR:").strip() if errors else "") or f"pytest ended with {done.returncode}"


def compact(adapter: str, results: dict) -> dict:
    """What the matrix keeps of one run's results."""
    subject, checks = results["subject"], results["checks"]
    quantises = bool(set(QUANTISERS) & set(subject["offers"]))
    rule = subject["choices"].get("mx_scale_rule", OCP_RULE) if quantises else None
    return {
        "adapter": adapter,
        "message": "",
        "name": subject["name"],
        "version": subject["version"],
        "url": subject["url"],
        **({"hash": subject["hash"]} if "hash" in subject else {}),
        "scale_rule": rule,
        "ocp_default": None if rule is None else rule == OCP_RULE,
        "choices": subject["choices"],
        "silent": list(subject["extra"].get("mx_silent", ())),
        "policies": list(subject["policies"]),
        "layouts": subject["layouts"],
        "offers": subject["offers"],
        "verdict": results["verdict"],
        "complete": results["complete"],
        "compared": results["compared"],
        "stages": tallied(checks, column),
        "walk": tallied([check for check in checks if check["kind"] == "trace"], lambda check: check["stage"]),
        "failing": [brief(check) for check in checks if check["verdict"] in FAULTS],
        "problems": results["problems"],
        "notes": results["notes"],
    }


def brief(check: dict) -> dict:
    """What is kept of a failing check: its worst element without the operands that went into it."""
    worst = check["worst"]
    return {key: check[key] for key in KEPT} | {"worst": worst and {key: worst[key] for key in ELEMENT if key in worst}}


def column(check: dict) -> str:
    """The method that a check calls: the walk and the end-to-end checks look at one ``unroll``."""
    return check["stage"] if check["kind"] == "stage" else "unroll"


def tallied(checks: list[dict], key) -> dict:
    """Number of checks by stage and status, in plan order; an error, a crash and a timeout count as failed as well."""
    table: dict[str, dict] = {}
    for check in checks:
        counts = table.setdefault(key(check), {})
        for status in {STATUSES[check["verdict"]], *(["failed"] if check["verdict"] in FAULTS else [])}:
            counts[status] = counts.get(status, 0) + 1
    return {stage: dict(sorted(counts.items())) for stage, counts in table.items()}


# -- findings ----------------------------------------------------------------------------------------------------------


def script_entry(script: scripts.Script, ran: dict) -> dict:
    return {"script": script.path.name, "sentence": script.sentence, "source": script.source} | ran


def grouped(adapters: list[dict], ran: list[tuple]) -> dict:
    """``findings``, each with the failing checks that show it, and ``unexplained``: those that no script explains."""
    failing = [(entry["adapter"], check) for entry in adapters for check in entry.get("failing", ())]
    findings, explained = [], set()
    for script, entry in ran:
        shows = [(adapter, check) for adapter, check in failing if script.explains(adapter, check["id"])]
        explained |= {(adapter, check["id"]) for adapter, check in shows}
        findings.append(
            entry
            | {
                "checks": [{"adapter": adapter, "id": check["id"]} for adapter, check in shows],
                "smallest": smallest(shows),
                "worst": worst(shows),
                "silent": bool(shows) and all(left_open(check["id"]) for _, check in shows),
            }
        )
    left = [(adapter, check["id"]) for adapter, check in failing if (adapter, check["id"]) not in explained]
    rest = [{"adapter": adapter, "id": check_id} for adapter, check_id in left]
    return {"findings": findings, "unexplained": rest}


def left_open(check_id: str) -> bool:
    """A check of MX, of a case where OCP MX v1.0 leaves the result open."""
    return "mxfp" in check_id.partition(".")[0] and check_id.rstrip("]").rpartition("-")[2] in SILENT


def smallest(shows: list[tuple]) -> dict | None:
    """The shortest of the inputs that the suite shrank, and what was found there."""
    inputs = []
    for adapter, check in shows:
        what, there, rest = check["message"].partition(SMALLEST)
        if there:
            inputs.append(
                {"adapter": adapter, "id": check["id"], "input": rest.partition(" (OCP is silent")[0], "found": what}
            )
    return min(inputs, key=lambda each: (len(each["input"]), each["input"]), default=None)


def worst(shows: list[tuple]) -> dict | None:
    """The check with the largest error over its bound."""
    size = lambda pair: float("inf") if (r := number(pair[1]["ratio"])) != r else -1.0 if r is None else r  # noqa: E731
    if not shows:
        return None
    adapter, check = max(shows, key=size)
    return {"adapter": adapter} | {key: check[key] for key in ("id", "verdict", "ratio", "message", "worst")}


def settled(row: dict) -> bool:
    """Every adapter ran, every failing check is explained, and every script reproduces its finding."""
    ran = not row["message"] and not any(entry["message"] for entry in row["adapters"])
    return ran and not row["unexplained"] and all(finding["reproduced"] for finding in row["findings"])
