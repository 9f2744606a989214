"""The command line, the options' ini values, and what a run leaves behind beside its results."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import made_up
import pytest
from stand_in import last_line, read

from draftconf.conformance import options
from draftconf.conformance.catalogue.descriptions import BOUNDARIES, boundaries, methods
from draftconf.conformance.catalogue.explain import names
from draftconf.conformance.catalogue.faults import FAULTS, hunted
from draftconf.conformance.cli import main
from draftconf.conformance.report.changes import changes, counted, ratio_moved
from draftconf.conformance.report.changes import read as read_results
from draftconf.conformance.report.summary import LINES, badge, job_summary, terminal_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def results_file(tmp_path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(made_up.everything()), encoding="utf-8")
    return path


# -- conform -----------------------------------------------------------------------------------------------------------


def test_stages_lists_every_method_and_boundary(capsys):
    assert main(["stages"]) == 0
    listed = capsys.readouterr().out
    for stage in (*methods(), *boundaries()):
        assert re.search(rf"^{re.escape(stage.name)} ", listed, re.M)
    assert {stage.name for stage in boundaries()} == set(BOUNDARIES)


def test_stages_tells_inputs_and_outputs_of_one(capsys):
    assert main(["stages", "lk_loss", "attention"]) == 0
    told = capsys.readouterr().out
    assert "draft_logits, target_logits" in told
    assert "report eq. 16" in told
    assert "mla_keyvalue of the step before" in told


def test_methods_described_are_those_of_the_protocol():
    from draftconf.conformance.protocol.description import METHODS

    assert {stage.name for stage in methods()} == set(METHODS)


def test_every_check_of_the_plan_hunts_something():
    without = [name for name in names() if not hunted(*name)]
    assert without == []
    used = {fault.what for name in names() for fault in hunted(*name)}
    assert [fault.what for fault in FAULTS if fault.what not in used] == []


def test_every_check_of_the_plan_can_be_explained(capsys):
    from draftconf.conformance.checks.plan import plan
    from draftconf.conformance.protocol.description import Description

    checks = plan(Description.from_dict({"name": "any", "formats": {"storage": "float32"}}))
    for check in checks[:: max(len(checks) // 60, 1)]:
        assert main(["explain", check.id, "--adapter", "my.py:a", "--seed", "3"]) == 0
        told = capsys.readouterr().out
        assert all(word in told for word in ("Hunts", "Bound", "Case", "Repeat", "my.py:a --seed 3"))
        assert f"[{check.id}]" in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["stages", "nope"], "there is no stage nope; known: align"),
        (["explain", "nope"], "'nope' is no check id"),
        (["explain", "nope.value.trace[mtp-float32-tame]"], "there is no check nope.value"),
        (["explain", "lk_loss.loss.stage[mtp-float32-nope]"], "there is no case nope"),
        (["new-adapter", "mine.txt"], "mine.txt is no Python file"),
        (["report", "gone.json"], "gone.json cannot be read"),
        (["report", str(ROOT / "README.md")], "README.md is not JSON"),
        (["report", str(ROOT / "conformance" / "report" / "results.schema.json")], "holds no results of this suite"),
        (["run", "fast", "--check", "nope"], "'nope' is no check id"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(capsys, monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert len(told.err.splitlines()) == 1


def test_report_renders_earlier_results_again(results_file, tmp_path, capsys):
    files = {flag: tmp_path / f"out{flag}" for flag in ("--report", "--html", "--badge")}
    arguments = [part for flag, path in files.items() for part in (flag, str(path))]
    assert main(["report", str(results_file), *arguments, "--compare", str(results_file)]) == 0
    assert "Nothing has changed." in files["--report"].read_text(encoding="utf-8")
    assert files["--html"].read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(files["--badge"].read_text())["color"] == "red"
    assert "since the earlier run: nothing has changed" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--plain"]])
def test_new_adapter_runs_at_once_and_passes(tmp_path, monkeypatch, flags, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-adapter", "mine.py", *flags]) == 0
    assert main(["new-adapter", "mine.py", *flags]) == 2
    assert "mine.py exists; --force overwrites it" in capsys.readouterr().err
    done = conform("run", "mine.py:adapter", "--stage", "lk_loss", "--results", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [c for c in read(tmp_path / "r.json")["checks"] if c["verdict"] == "pass"]
    assert {c["quantity"] for c in checks} >= {"loss", "d_draft_logits", "gradient_set"}


def conform(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """In a process of its own, away from the checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "draftconf", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_run_repeats_one_check_and_hands_options_on(tmp_path):
    check = "lk_loss.loss.stage[mtp-float64-tame]"
    done = conform("run", "reference", "--check", check, "--results", "r.json", "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "r.json")["counts"]["executed"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nonesuch"], "conform: there is no adapter 'nonesuch'; known: "),
        (["gone.py:adapter"], "conform: there is no adapter file gone.py"),
        (
            ["broken.py:adapter"],
            "conform: adapter 'broken.py:adapter' cannot be loaded: No module named 'nothing_such'",
        ),
        (["mute.py:adapter"], "conform: describe()['name'] is None; wanted a string"),
        (["reference", "--policy", "int4"], "conform: --policy int4: the adapter reference offers float64"),
        (["reference", "--stage", "nothing"], "conform: --stage nothing is none of the stages planned"),
        (["reference", "--deviations", "gone.toml"], "conform: --deviations gone.toml "),
        (["nonesuch", "-n", "2"], "conform: there is no adapter 'nonesuch'; known: "),
    ],
)
def test_run_tells_a_mistake_in_one_sentence_with_exit_code_2(tmp_path, arguments, sentence):
    (tmp_path / "broken.py").write_text("import nothing_such\nadapter = None\n", encoding="utf-8")
    (tmp_path / "mute.py").write_text(MUTE, encoding="utf-8")
    done = conform("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.strip().splitlines()) == 1


MUTE = "class Mute:\n    protocol = 1\n    def describe(self):\n        return {}\nadapter = Mute()\n"
WRONG = """
from draftconf.conformance.adapters.reference import Reference

class Wrong(Reference):
    def situ_glu(self, inputs, **options):
        outputs, *rest = super().situ_glu(inputs, **options)
        return {"y": outputs["y"] * 1.5}, *rest

adapter = Wrong()
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_failure_is_repeated_with_the_command_that_was_run(tmp_path, workers):
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    arguments = ["wrong.py:adapter", "--stage", "situ_glu", "--seed", "3"]
    done = conform("run", *arguments, *workers, "--results", "r.json", cwd=tmp_path)
    assert done.returncode == 1
    repeat = read(tmp_path / "r.json")["first_fault"]["repeat"]
    assert repeat.startswith("conform run wrong.py:adapter --check 'situ_glu.y.stage[")
    assert f"repeat  {repeat}" in done.stdout
    again = conform(*shlex.split(repeat)[1:], cwd=tmp_path)
    assert again.returncode == 1
    assert "executed 1: 0 passed, 1 failed" in again.stdout


def test_vectors_speaks_as_the_other_commands(capsys):
    for arguments in (["vectors", "--help"], ["vectors", "check", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: conform {' '.join(arguments[:-1])} ")
    assert main(["vectors", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("conform: argument COMMAND: invalid choice: 'nothing'")
    assert main(["vectors", "check", "gone", "gone"]) == 2
    assert re.fullmatch(r"conform: [^\n]*gone[^\n]*\n", capsys.readouterr().err)


# -- options -----------------------------------------------------------------------------------------------------------


def test_every_option_has_an_ini_value(suite, pytester):
    pytester.makeini("[pytest]\ndraftconf_stage = route\ndraftconf_seed = 7\ndraftconf_results = from_ini.json\n")
    assert suite("Good").ret == 0
    results = read("from_ini.json")
    assert (results["seed"], results["selection"]["stage"]) == (7, "route")
    assert suite("Good", "--seed", "3", "-n", "2").ret == 0
    assert read("from_ini.json")["seed"] == 3
    assert len({option.ini for option in options.OPTIONS}) == len(options.OPTIONS)


def test_documentation_lists_every_option():
    text = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    for option in options.OPTIONS:
        assert f"`{option.flag}`" in text or f"`{option.flag} " in text
        assert f"`{option.ini}`" in text


# -- what a run leaves behind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["0", "2"])
def test_junit_carries_stage_policy_and_ratio(suite, workers):
    suite("Wrong", "-n", workers, "--junit-xml", "junit.xml")
    found = {}
    for case in ElementTree.parse("junit.xml").iter("testcase"):
        told = {p.get("name"): p.get("value") for p in case.iter("property")}
        if "stage" in told:
            found[case.get("name")] = told
    wrong = found["test_trace[route.output.trace[mtp-float64-tame]]"]
    assert (wrong["stage"], wrong["policy"], wrong["verdict"], wrong["first_step"]) == ("route", "float64", "fail", "3")
    assert float(wrong["ratio"]) > 41
    assert len(found) == 48


def test_page_badge_and_summary_are_written(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "summary.md").write_text("before\n")
    suite("Wrong", "--html", "page.html", "--badge", "badge.json", "--summary")
    assert Path("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert read("badge.json")["message"] == "12 faults"
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("before\n## ")
    assert "fault found" in summary.splitlines()[1]


def test_summary_without_the_variable_is_said_not_failed(suite, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    result = suite("Good", "--summary")
    assert result.ret == 0
    assert "no summary was written" in result.stdout.str()


@pytest.mark.parametrize("count", [1, 5000])
def test_job_summary_is_short_with_the_status_first(count):
    results = made_up.many(count)
    text = job_summary(results, changes(made_up.everything(), results))
    assert "fault found" in text.splitlines()[0]
    assert len(text.splitlines()) <= LINES
    assert len(text.encode()) < 1024 * 1024
    assert "%" not in text


def test_job_summary_cannot_be_broken_by_names():
    text = job_summary(made_up.everything())
    assert "<script" not in text
    assert "<b>up" not in text


def test_badge_counts_and_is_green_only_when_complete():
    good = made_up.build([(made_up.entry("embed"), made_up.PASS)])
    assert badge(good) == {
        "schemaVersion": 1, "label": "draft conformance", "message": "1 passed", "color": "brightgreen",
    }  # fmt: skip
    assert badge(good | {"complete": False})["color"] == "yellow"
    assert badge(made_up.everything())["message"] == "2 faults"
    lost = made_up.build([(made_up.entry("embed"), None)])
    assert badge(lost)["color"] == "lightgrey"


def test_terminal_table_has_a_row_for_each_kind_and_policy():
    head, *rows = terminal_table(made_up.everything())
    assert head.split()[:3] == ["kind", "policy", "passed"]
    assert [row.split()[:2] for row in rows] == [
        ["stages", "float32"], ["stages", "bfloat16"], ["walk", "float32"], ["end", "to"],
    ]  # fmt: skip


# -- comparing runs ----------------------------------------------------------------------------------------------------


def test_changes_name_what_is_new_fixed_moved_added_and_removed():
    entry, ok, bad = made_up.entry, made_up.PASS, made_up.FAIL
    undecided = ok | {"verdict": "undecided"}
    old = made_up.build(
        [(entry("a"), ok), (entry("b"), bad), (entry("c"), ok), (entry("d"), ok), (entry("e"), ok), (entry("g"), ok)]
    )
    new = made_up.build(
        [(entry("a"), bad), (entry("b"), ok), (entry("c"), ok | {"ratio": 0.2}), (entry("d"), ok | {"ratio": 0.3}),
         (entry("f"), ok), (entry("g"), undecided)]
    )  # fmt: skip
    found = changes(old, new)
    stages = {kind: [entry["id"][0] for entry in entries] for kind, entries in found.items() if kind != "notes"}
    assert stages == {
        "failing": ["a"], "fixed": ["b"], "moved": ["c"], "added": ["f"], "removed": ["e"], "verdict": ["g"],
    }  # fmt: skip
    assert counted(found) == "1 newly failing, 1 fixed, 1 with another verdict, 1 moved, 1 added, 1 removed"
    assert counted(changes(new, new)) == "nothing has changed"
    assert changes(old, new | {"seed": 6})["notes"] == ["seed: 5 before, 6 now"]


def test_ratios_far_below_the_bound_do_not_count_as_moved():
    assert not ratio_moved(0.001, 0.009)
    assert ratio_moved(0.1, 0.21)
    assert ratio_moved(None, 0.5)
    assert ratio_moved(0.5, "nan")
    assert not ratio_moved("inf", "inf")


def test_compare_shows_changes_and_narrowing_removes_nothing(suite):
    suite("Good", "--results", "old.json")
    result = suite("Wrong", "--compare", "old.json", "--report", "r.md", "--stage", "route")
    assert "since the earlier run: 12 newly failing" in result.stdout.str()
    assert "### Newly failing: 12" in Path("r.md").read_text(encoding="utf-8")


def test_unreadable_comparison_is_a_usage_error_before_anything_runs(suite):
    Path("bad.json").write_text("{}")
    for name, said in (("gone.json", "cannot be read"), ("bad.json", "holds no results of this suite")):
        result = suite("Good", "--compare", name)
        assert result.ret == 4
        assert said in result.stderr.str()


def test_deeply_nested_file_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        read_results(tmp_path / "deep.json")


# -- the terminal ------------------------------------------------------------------------------------------------------


def on_a_terminal(command: list[str], environment: dict) -> str:
    """What a program writes when its output is a terminal."""
    parent, child = pty.openpty()
    with subprocess.Popen(command, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        parts = []
        while True:
            try:
                part = os.read(parent, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
        process.wait()
    os.close(parent)
    return b"".join(parts).decode()


SLOW = """
import time, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    time.sleep(0.06)
"""


@pytest.mark.parametrize("colour", [True, False])
def test_progress_on_a_terminal_and_no_colour_where_none_is_wanted(suite, pytester, colour):
    pytester.makepyfile(slow=SLOW)
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CI")}
    environment |= {"TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": f"{ROOT}:{pytester.path}"}
    environment |= {} if colour else {"NO_COLOR": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "standin", "-p", "slow", "-p", "draftconf.conformance.plugin"]
    command += ["--pyargs", "draftconf.conformance", "--adapter", "adapters:Wrong", "-p", "no:cacheprovider"]
    told = on_a_terminal(command, environment)
    assert re.search(r"\r\d+ of 48  \w+\.output\.\w+  mtp-float(32|64)-(tame|harsh)  about 0:0\d left", told)
    assert ("\x1b[" in told) == colour
    assert "7 more failures" in told
    assert "12 failed" in told
    assert ".F" not in told


def test_dots_and_no_progress_line_where_there_is_no_terminal(suite):
    told = suite("Good").stdout.str()
    assert " left" not in told
    assert "\r" not in told


def test_last_line_is_still_the_verdict(suite):
    assert last_line(suite("Wrong")).startswith("First fault: step 3, stage route")
