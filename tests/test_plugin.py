"""The plugin, run by pytester on a small stand-in plan: verdicts, exit codes, and the guards against a false green."""

import json
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

STAND_IN = '''
"""Loaded with -p: puts a small plan in the place of conformance.checks."""

import sys, types
from dataclasses import dataclass
import numpy as np
from reference.config import Choices, DraftConfig

@dataclass(frozen=True)
class Check:
    id: str; kind: str; stage: str; quantity: str; aspect: str; case: str; layout: str; policy: str; order: tuple

    def run(self, subject):
        x = np.arange(4.0)
        result = subject.call(self.stage, config=DraftConfig.tiny(), choices=Choices(), policy=self.policy,
                              inputs={"x": x, "case": self.case}, cotangents={"y": np.ones(4)})
        y = result.outputs["y"]
        outcome = {"verdict": "pass", "ratio": None, "steps": [], "worst": None, "bias": None, "compared": 4,
                   "decisions": {"total": 4, "flipped": 1, "legal": 1, "illegal": 0}, "first_step": None, "message": ""}
        if y.shape != x.shape:
            return outcome | {"verdict": "fail", "message": f"{self.stage} has shape {y.shape}; wanted (4,)"}
        ratio = float(np.abs(y - x).max())
        outcome["ratio"] = np.float64(ratio)  # what travels between processes must not depend on this
        if self.kind == "trace":
            outcome["steps"] = [ratio * k for k in range(7)]
            outcome["first_step"] = 3 if ratio > 1 else None
        if ratio > 1:
            outcome |= {"verdict": "fail", "message": "an element is out of bound",
                        "worst": {"step": 3, "index": [2], "actual": 1.5, "expected": 0.1, "error": 1.4, "bound": 0.1}}
        return outcome

def plan(description, *, policies=None, stages=None, seed=0):
    checks = []
    for kind in ("stage", "trace", "end_to_end"):
        for number, stage in enumerate(("attention", "route", "lk_loss", "align")):
            for policy in policies or description.policies:
                for case in ("tame", "harsh"):
                    name = f"mtp-{policy}-{case}"
                    checks.append(Check(f"{stage}.output.{kind}[{name}]", kind, stage, "output", kind, name, "mtp",
                                        policy, (0, number)))
    return checks if description.name != "empty" else []

sys.modules["conformance.checks"] = types.SimpleNamespace(plan=plan)
'''

ADAPTERS = """
import numpy as np

class Good:
    protocol = 1
    name = "good"
    def describe(self):
        return {"name": self.name, "version": "1", "policies": {p: {"storage": p} for p in ("float64", "float32")}}
    def start(self, config, choices, formats): pass
    def attention(self, inputs, *, cotangents=None, forced=None):
        return {"y": inputs["x"] + 0.5}
    route = lk_loss = attention

class Nothing(Good):
    name = "nothing"
    attention = route = lk_loss = None

class Empty(Good):
    name = "empty"

class Wrong(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        return {"y": inputs["x"] + 41.2}

class Raises(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        raise RuntimeError("no kernel")

class Skips(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        import pytest
        pytest.skip("I would rather not")

class Mutates(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        inputs["x"].base.setflags(write=True)
        inputs["x"].base[0] = 7
        return {"y": inputs["x"]}

class Shapes(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        return {"y": inputs["x"][:2]}

class Stops(Good):
    def stop(self):
        raise RuntimeError("still busy")

class Dies(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        import os
        os._exit(9)
"""

LOSE_ONE = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    return True if "route.output.trace[mtp-float32-tame]" in item.nodeid else None
"""

NUMPY_PROPERTY = """
import numpy as np, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.user_properties.append(("ratio", np.float64(0.5)))
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Run ``pytest --pyargs conformance`` away from the checkout, on the stand-in plan."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(standin=STAND_IN, adapters=ADAPTERS, lose_one=LOSE_ONE, numpy_property=NUMPY_PROPERTY)
    pytester.makeini("[pytest]")

    def run(adapter, *args, target=("--pyargs", "conformance")):
        return pytester.runpytest_subprocess(
            "-p", "standin", "-p", "conformance.plugin", *target, "--adapter", f"adapters:{adapter}", *args
        )

    return run


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def last_line(result) -> str:
    return [line for line in result.outlines if line.strip()][-1]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_good_adapter_passes_and_what_it_lacks_is_said(suite, workers):
    result = suite("Good", "-n", workers, "--report", "r.md", "--results", "r.json")
    assert result.ret == 0
    counts = read("r.json")["counts"]
    assert (counts["planned"], counts["passed"], counts["not offered"], counts["executed"]) == (48, 36, 12, 36)
    assert last_line(result) == "No fault found: 36 passed, 12 not offered."
    assert read("r.json")["complete"] is True
    report = Path("r.md").read_text(encoding="utf-8")
    assert "align is not offered" in report
    assert "%" not in report


def test_report_and_results_do_not_depend_on_the_number_of_workers(suite):
    for workers in ("0", "2"):
        suite("Wrong", "-n", workers, "--report", f"{workers}.md", "--results", f"{workers}.json")
    assert Path("0.md").read_bytes() == Path("2.md").read_bytes()
    assert Path("0.json").read_bytes() == Path("2.json").read_bytes()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_first_fault_is_named_in_the_last_line(suite, workers):
    result = suite("Wrong", "-n", workers)
    assert result.ret == 1
    assert last_line(result) == (
        "First fault: step 3, stage route (output): error 41.2 x its bound [mtp-float64-tame]. Repeat: "
        "pytest --pyargs 'conformance.test_trace::test_trace[route.output.trace[mtp-float64-tame]]' "
        "--adapter adapters:Wrong --seed 0"
    )
    assert "Traceback" not in result.stdout.str()


def test_repeat_command_selects_one_check(suite):
    printed = shlex.split(last_line(suite("Wrong", "--policy", "float32")).partition("Repeat: pytest ")[2])
    assert printed[0] == "--pyargs"
    suite("Wrong", "-n", "1", target=printed[:2]).assert_outcomes(failed=1)
    node = "conformance.test_trace::test_trace[route.output.trace[mtp-float32-harsh]]"
    assert suite("Good", target=("--pyargs", node)).ret == 0
    checkout = "conformance/test_trace.py::test_trace[route.output.trace[mtp-float32-harsh]]"
    result = suite("Wrong", "--rootdir", str(ROOT), "-c", "tox.ini", target=(f"{ROOT}/{checkout}",))
    result.assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("Raises", "route raised RuntimeError: no kernel"),
        ("Skips", "route raised Skipped: I would rather not"),
        ("Mutates", "route changed its input 'x', which is read-only"),
        ("Shapes", "route has shape (2,); wanted (4,)"),
    ],
)
def test_faulty_adapters_fail_with_a_sentence(suite, adapter, message):
    result = suite(adapter, "--results", "r.json", "--report", "r.md")
    assert result.ret == 1
    assert message in last_line(result)
    assert message in Path("r.md").read_text(encoding="utf-8")
    faulty = [check for check in read("r.json")["checks"] if check["verdict"] in ("fail", "error")]
    assert {check["stage"] for check in faulty} == {"route"}
    assert len(faulty) == 12


@pytest.mark.parametrize(("adapter", "workers"), [("Nothing", "0"), ("Nothing", "2"), ("Empty", "0")])
def test_no_executed_check_is_a_failure(suite, adapter, workers):
    result = suite(adapter, "-n", workers, "--results", "r.json")
    assert result.ret == 1
    assert "No check was executed, so there is no verdict" in last_line(result)
    assert read("r.json")["verdict"] == "nothing checked"


def test_deselecting_everything_is_a_failure(suite):
    result = suite("Good", "-k", "no_such_check")
    assert result.ret == 1
    assert "all 48 planned checks were deselected" in last_line(result)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_lost_check_is_a_failure(suite, workers):
    result = suite("Good", "-n", workers, "-p", "lose_one", "--results", "r.json")
    assert result.ret == 1
    assert "1 of 48 checks gave no result" in last_line(result)
    assert "no result came back for route.output.trace[mtp-float32-tame]" in result.stdout.str()
    assert read("r.json")["complete"] is False


def test_unsendable_property_cannot_turn_a_fault_green(suite):
    assert suite("Wrong", "-n", "2", "-p", "numpy_property").ret != 0


def test_crashed_worker_is_an_error(suite):
    result = suite("Dies", "-n", "2", "--max-worker-restart", "20", "--results", "r.json")
    assert result.ret == 1
    crashed = [check for check in read("r.json")["checks"] if check["verdict"] == "error"]
    assert {check["stage"] for check in crashed} == {"route"}
    assert "crashed" in crashed[0]["message"]


def test_stop_that_raises_is_a_fault(suite):
    result = suite("Stops", "--results", "r.json")
    assert result.ret == 1
    assert "stop raised RuntimeError: still busy" in result.stdout.str()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--adapter", "nonesuch"), "there is no adapter 'nonesuch'; known: "),
        (("--adapter", "adapters:Nonesuch"), "there is no attribute 'Nonesuch'"),
        (("--adapter", "gone.py:adapter"), "there is no adapter file gone.py"),
        (("--policy", "float16"), "--policy float16: the adapter adapters:Good offers float64, float32"),
        (("--stage", "attenton"), "--stage attenton is none of the stages planned for this adapter: attention, route"),
        (("--deviations", "known.toml"), "--deviations is not supported yet"),
    ],
)
def test_usage_errors_exit_with_4_and_a_sentence(suite, args, message):
    result = suite("Good", *args)
    assert result.ret == 4
    assert message in result.stdout.str() + result.stderr.str()


def test_usage_error_is_told_for_a_single_node_too(suite):
    node = "conformance.test_trace::test_trace[route.output.trace[mtp-float32-harsh]]"
    result = suite("Good", "--adapter", "nonesuch", target=("--pyargs", node))
    assert result.ret == 4
    assert "there is no adapter 'nonesuch'" in result.stdout.str()


def test_usage_error_of_workers_reaches_the_controller(suite):
    result = suite("Good", "-n", "2", "--stage", "attenton")
    assert result.ret == 4
    assert "--stage attenton is none of the stages" in last_line(result)


def test_narrowed_run_says_that_it_is_not_complete(suite):
    result = suite("Good", "--stage", "att*,route", "--policy", "float32", "--results", "r.json")
    assert result.ret == 0
    results = read("r.json")
    assert results["counts"]["passed"] == 12
    assert {check["stage"] for check in results["checks"]} == {"attention", "route"}
    assert results["complete"] is False
    assert "only a part of the plan" in last_line(result)


def test_other_test_runs_load_no_adapter(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]")
    pytester.makepyfile(
        """
        import sys
        def test_nothing_heavy_was_imported():
            assert not {"numpy", "torch", "conformance.adapter", "conformance.adapters.fast"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "conformance.plugin", "-p", "no:hypothesispytest", "--adapter", "nonesuch"
    )
    assert result.ret == 0
    assert "conformance" not in last_line(result)


def test_example_of_the_readme_passes_the_real_plan(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]")
    example = ("--adapter", f"{ROOT}/examples/my_lk.py:MyLoss", "--stage", "lk_loss", "--results", "r.json")
    result = pytester.runpytest_subprocess("-p", "conformance.plugin", "--pyargs", "conformance", *example)
    assert result.ret == 0
    checks = read("r.json")["checks"]
    assert {check["quantity"] for check in checks if check["verdict"] == "pass"} >= {
        "loss",
        "d_draft_logits",
        "gradient_set",
    }


def test_collect_only_gives_ids_and_no_verdict(suite):
    result = suite("Good", "--collect-only", "-q")
    assert result.ret == 0
    assert "test_trace.py::test_trace[route.output.trace[mtp-float32-harsh]]" in result.stdout.str()
