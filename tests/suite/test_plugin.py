"""The plugin, run by pytester on a small stand-in plan: verdicts, exit codes, and the guards against a false green."""

import shlex
from pathlib import Path

import pytest
from stand_in import last_line, read

ROOT = Path(__file__).resolve().parents[2]


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
        "pytest --pyargs 'draftconf.conformance.test_trace::test_trace[route.output.trace[mtp-float64-tame]]' "
        "--adapter adapters:Wrong --seed 0"
    )
    assert "Traceback" not in result.stdout.str()


def test_repeat_command_selects_one_check(suite):
    printed = shlex.split(last_line(suite("Wrong", "--policy", "float32")).partition("Repeat: pytest ")[2])
    assert printed[0] == "--pyargs"
    suite("Wrong", "-n", "1", target=printed[:2]).assert_outcomes(failed=1)
    node = "draftconf.conformance.test_trace::test_trace[route.output.trace[mtp-float32-harsh]]"
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
    result = suite("Dies", "--no-isolate", "-n", "2", "--max-worker-restart", "20", "--results", "r.json")
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
        (("--deviations", "gone.toml"), "--deviations gone.toml cannot be read: No such file"),
        (("--adapter-python", "gone"), "--adapter-python gone: there is no interpreter gone"),
        (("--adapter-python", "gone", "--no-isolate"), "--adapter-python needs a process of its own"),
        (("--call-timeout", "0"), "--call-timeout 0: wanted a number of seconds above 0"),
        (("--memory", "-1"), "--memory -1: wanted a number of GiB"),
    ],
)
def test_usage_errors_exit_with_4_and_a_sentence(suite, args, message):
    result = suite("Good", *args)
    assert result.ret == 4
    assert message in result.stdout.str() + result.stderr.str()


def test_usage_error_is_told_for_a_single_node_too(suite):
    node = "draftconf.conformance.test_trace::test_trace[route.output.trace[mtp-float32-harsh]]"
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
            heavy = {"numpy", "torch", "draftconf.conformance.protocol.subject", "draftconf.conformance.adapters.fast"}
            assert not heavy & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "draftconf.conformance.plugin", "-p", "no:hypothesispytest", "--adapter", "nonesuch"
    )
    assert result.ret == 0
    assert "conformance" not in last_line(result)


def test_example_of_the_readme_passes_the_real_plan(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]")
    example = ("--adapter", f"{ROOT}/examples/my_lk.py:MyLoss", "--stage", "lk_loss", "--results", "r.json")
    result = pytester.runpytest_subprocess(
        "-p", "draftconf.conformance.plugin", "--pyargs", "draftconf.conformance", *example
    )
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
