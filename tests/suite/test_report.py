"""Results and their renderings, on outcomes made up for the purpose."""

import json
import math
import re
import shlex
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from draftconf.conformance.report import results
from draftconf.conformance.report import text as report
from draftconf.conformance.report.files import as_json, write
from draftconf.conformance.report.fingerprint import DECIDING, content_hash, suite
from draftconf.conformance.report.markdown import FINDINGS_IN_FULL, markdown
from draftconf.conformance.report.schema import validate

PASS = {
    "verdict": "pass", "ratio": 0.5, "steps": [], "worst": None, "bias": 1.25, "compared": 10,
    "decisions": None, "first_step": None, "message": "",
}  # fmt: skip
SUBJECT = {
    "name": "made up", "version": "3", "url": "", "formats": {"storage": "float32"}, "choices": {"head": "own"},
    "layouts": ["mtp"], "policies": {"float32": {"storage": "float32"}}, "documents": True, "offers": ["unroll"],
    "extra": {},
}  # fmt: skip
WORST = {
    "step": 3,
    "index": [0, 4],
    "actual": 0.1,
    "actual_hex": (0.1).hex(),
    "expected": 0.2,
    "error": 0.1,
    "bound": 1e-3,
}


def check(stage, kind="trace", quantity="output", case="mtp-float32-tame", order=(0, 0)):
    check_id = f"{stage}.{quantity}.{kind}[{case}]"
    fields = {"id": check_id, "kind": kind, "stage": stage, "quantity": quantity, "aspect": kind, "case": case}
    return results.about(SimpleNamespace(**fields, layout="mtp", policy="float32", order=order))


def build(entries, selected=None, selection=None, **more):
    plan = [entry for entry, _ in entries]
    return results.build(
        plan=plan,
        outcomes={entry["id"]: results.clean(outcome, entry) for entry, outcome in entries if outcome is not None},
        selected={entry["id"] for entry in plan} if selected is None else selected,
        subject=SUBJECT,
        adapter="my file.py:adapter",
        seed=5,
        env={"python": "3.11.0", "numpy": "2.4.0", "torch": None},
        selection={"stage": None, "policy": None, "pyargs": False} | (selection or {}),
        **more,
    )


def trace(*steps, **more):
    return PASS | {"steps": list(steps), "ratio": max(steps, default=None)} | more


def failed(step, ratio, **more):
    steps = [0.5] * (step - 1) + [ratio] * (8 - step)
    return trace(*steps, verdict="fail", first_step=step, message="an element is out of bound", worst=WORST, **more)


# -- results ---------------------------------------------------------------------------------------------------------


def test_clean_writes_only_json_and_keeps_what_it_does_not_know():
    outcome = PASS | {"ratio": np.float64("inf"), "compared": np.int64(3), "steps": np.array([1.0, np.nan]), "width": 2}
    cleaned = results.clean(outcome, check("attention"))
    assert json.loads(json.dumps(cleaned, allow_nan=False)) == cleaned
    assert (cleaned["ratio"], cleaned["compared"], cleaned["steps"]) == ("inf", 3, [1.0, "nan"])
    assert cleaned["extra"] == {"width": 2}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"verdict": "ok"}, "outcome.verdict is 'ok'"),
        ({"verdict": "lost"}, "not for a check to say"),
        ({"compared": 1.5}, "outcome.compared is 1.5; wanted integer"),
        ({"compared": True}, "outcome.compared is True"),
        ({"ratio": "large"}, "outcome.ratio is 'large'"),
        ({"steps": [0.1, "x"]}, r"outcome.steps\[1\]"),
        ({"decisions": {"total": 4}}, "outcome.decisions"),
        ({"message": None}, "outcome.message is None; wanted string"),
    ],
)
def test_outcome_that_the_schema_refuses(change, place):
    with pytest.raises(ValueError, match=place):
        results.clean(PASS | change, check("attention"))


def test_schema_refuses_missing_and_unknown_keys():
    good = build([(check("attention"), trace(0.1))])
    validate(good)
    for damage, sentence in (
        (lambda r: r.pop("seed"), "results has no seed"),
        (lambda r: r["counts"].update(rate=1), "results.counts has rate"),
        (lambda r: r.update(schema=2), "results.schema is 2"),
        (lambda r: r["checks"][0].pop("case"), r"results.checks\[0\] has no case"),
    ):
        bad = deepcopy(good)
        damage(bad)
        with pytest.raises(ValueError, match=sentence):
            validate(bad)


def test_counts_and_completeness():
    stages = ["fusion", "attention", "route", "logits", "lk_loss"]
    undecided, absent = trace(3.0, verdict="undecided"), PASS | {"verdict": "not offered", "ratio": None}
    entries = list(zip(map(check, stages), [trace(0.1), undecided, absent, None, None], strict=True))
    got = build(entries, selected={entry["id"] for entry, _ in entries[:4]})
    assert got["counts"] == {
        "planned": 5, "executed": 2, "passed": 1, "failed": 0, "undecided": 1, "not offered": 1, "errors": 0,
        "crashes": 0, "timeouts": 0, "known deviations": 0, "lost": 1, "deselected": 1,
    }  # fmt: skip
    assert (got["verdict"], got["complete"]) == ("checks lost", False)
    assert build(entries[:3])["complete"] is True
    assert build(entries[:3], selection={"stage": "route"})["complete"] is False
    assert build(entries[2:3])["verdict"] == "nothing checked"
    assert build([])["verdict"] == "nothing checked"
    assert build(entries[:3], problems=["stop raised"])["verdict"] == "fault found"


def test_decisions_and_comparisons_are_summed():
    decided = {"total": 5, "flipped": 2, "legal": 2, "illegal": 0}
    got = build([(check("route"), trace(0.1, decisions=decided)), (check("lk_loss"), trace(0.1, decisions=decided))])
    assert got["decisions"] == {"total": 10, "flipped": 4, "legal": 4, "illegal": 0}
    assert got["compared"] == 20


def test_first_fault_is_the_first_in_data_order():
    backward = (check("lk_loss", quantity="grad", order=(1, 0)), failed(7, 900.0))
    late = (check("fusion", order=(0, 0)), failed(4, 1e6))
    first = (check("logits", order=(0, 9)), failed(3, 41.2))
    alone = (check("mxfp4", kind="stage", order=(0, 0)), PASS | {"verdict": "fail", "ratio": 1e9})
    whole = (check("total", kind="end_to_end", order=(0, 0)), PASS | {"verdict": "fail", "ratio": 2.0})
    order = [whole, alone, backward, late, first]
    named = ["logits", "fusion", "lk_loss", "mxfp4", "total"]
    assert [fault["stage"] for fault in results.faults(build(order))] == named
    sentence = build(order)["first_fault"]["sentence"]
    assert sentence.startswith(
        "First fault: step 3, stage logits (output): error 41.2 x its bound [mtp-float32-tame]. "
    )


def test_backward_the_last_step_comes_first():
    early = (check("attention", quantity="grad", order=(1, 0)), failed(2, 5.0))
    late = (check("fusion", quantity="grad", order=(1, 9)), failed(6, 5.0))
    assert [fault["stage"] for fault in results.faults(build([early, late]))] == ["fusion", "attention"]


def test_rank_of_the_walk_goes_before_the_place_in_the_plan():
    early = (check("logits", order=(0, 9)), failed(2, 5.0, rank=[0, 2, 9]))
    late = (check("fusion", order=(0, 0)), failed(4, 5.0, rank=[0, 4, 0]))
    assert [fault["stage"] for fault in results.faults(build([late, early]))] == ["logits", "fusion"]


def test_order_keys_of_mixed_types_compare():
    mixed = [(check(s, order=o), failed(1, 2.0)) for s, o in (("a", (0, "x")), ("b", (0, 1)), ("c", (0, [1, 2])))]
    assert len(results.faults(build(mixed))) == 3


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"verdict": "fail", "ratio": math.inf, "message": "9 illegal choices"}, "9 illegal choices"),
        ({"verdict": "fail", "ratio": math.nan}, "fail, ratio nan"),
        ({"verdict": "fail", "ratio": 5.0, "message": "x; only y fits"}, "error 5 x its bound; only y fits"),
        ({"verdict": "fail", "ratio": None, "message": "key 3/logits is missing."}, "key 3/logits is missing"),
        ({"verdict": "fail", "ratio": 0.9, "message": "signed bias z = 60"}, "signed bias z = 60"),
        ({"verdict": "error", "ratio": None, "message": "unroll raised X"}, "unroll raised X"),
    ],
)
def test_a_fault_without_a_finite_ratio_says_what_it_is(outcome, words):
    got = build([(check("logits"), PASS | outcome)])
    blamed = "unroll" if outcome["verdict"] == "error" else "logits"  # a call that raised is nobody else's fault
    assert f"stage {blamed} (output): {words} [mtp" in got["first_fault"]["sentence"]


def test_repeat_command_is_safe_in_a_shell():
    command = build([(check("logits"), failed(1, 2.0))])["first_fault"]["repeat"]
    node = "conformance/test_trace.py::test_trace[logits.output.trace[mtp-float32-tame]]"
    assert shlex.split(command) == ["pytest", node, "--adapter", "my file.py:adapter", "--seed", "5"]
    command = build([(check("logits"), failed(1, 2.0))], selection={"pyargs": True})["first_fault"]["repeat"]
    node = "draftconf.conformance.test_trace::test_trace[logits.output.trace[mtp-float32-tame]]"
    assert shlex.split(command)[:3] == ["pytest", "--pyargs", node]


def test_suite_hash_is_that_of_stages_and_cases():
    about = suite()
    assert len(about["hash"]) == 12
    assert about["protocol"] == 1


# -- renderings ------------------------------------------------------------------------------------------------------


def full_run():
    width = PASS | {"verdict": "undecided", "ratio": 40.0, "message": "the bound is 0.58 of it", "width": 0.58}
    absent = PASS | {"verdict": "not offered", "ratio": None, "message": "mla is not offered"}
    decided = {"total": 70, "flipped": 6, "legal": 5, "illegal": 1}
    return [
        (check("fusion"), trace(0.25)),
        (check("route", order=(0, 3)), failed(3, 41.2, decisions=decided)),
        (check("route", order=(0, 3), case="mtp-float32-harsh"), trace(*[0.75] * 7)),
        (check("fc.weight", quantity="gradient", order=(2, 0)), PASS),
        (check("lk_loss", kind="stage"), PASS),
        (check("mla", kind="stage"), absent),
        (check("unroll", kind="end_to_end", quantity="grads"), width),
    ]


def test_markdown_has_every_part_and_no_rate():
    text = markdown(build(full_run()))
    assert text.splitlines()[2].startswith("**Fault found. First fault: step 3, stage route (output): error 41.2 x")
    assert "| complete | yes |" in text
    assert "| planned | 7 |" in text
    assert "| elements compared | 70 |" in text
    assert "| choices that differ from the default | head own |" in text
    assert "## The walk: float32 mtp" in text
    assert "| fusion | output | 0.25 | - | - | - | - | - | - | 1.2 | 1 passed |" in text
    assert (
        "| route | output | 0.75 | 0.75 | **41** | **41** | **41** | **41** | **41** | 1.2 | 1 passed, 1 failed |"
        in text
    )
    assert "## End to end: float32 mtp" in text
    assert "| grads | undecided, 0.58 wide |" in text
    assert "| stage | float32 mtp |\n| --- | --- |\n| fc.weight | 0.5 |" in text
    assert "| float32 | route | 70 | 6 | 5 | **1** |" in text
    assert "| lk_loss | output | 0.5 | 1.2 | 1 passed |" in text
    assert "| mla | mla is not offered | 1 |" in text
    assert f"- actual_hex: {(0.1).hex()}" in text
    assert "repeat: `pytest 'conformance/test_trace.py::test_trace[route.output.trace[mtp-float32-tame]]'" in text
    assert "%" not in text


def test_markdown_and_results_are_the_same_each_time(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name / "REPORT.md", markdown(build(full_run())))
        write(tmp_path / name / "results.json", as_json(build(full_run())))
    for file in ("REPORT.md", "results.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["REPORT.md", "results.json"]
    validate(json.loads((tmp_path / "a" / "results.json").read_text(encoding="utf-8")))


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "REPORT.md"
    path.write_text("old", encoding="utf-8")

    def refuse(part, target):
        assert part.read_text(encoding="utf-8").startswith("# Conformance report")
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write(path, markdown(build(full_run())))
    assert [file.name for file in tmp_path.iterdir()] == ["REPORT.md"]
    assert path.read_text(encoding="utf-8") == "old"


def test_many_findings_are_listed_but_not_all_in_full():
    many = [(check(f"stage{n}", order=(0, n)), failed(1, 2.0)) for n in range(100)]
    text = markdown(build(many))
    assert text.count("\n### ") == FINDINGS_IN_FULL
    assert all(f"`stage{n}.output.trace[mtp-float32-tame]`" in text for n in range(100))


def test_closing_sentences():
    good = build([(check("fusion"), trace(0.25)), (check("logits"), trace(3.0, verdict="undecided"))])
    assert report.closing(good) == "No fault found: 1 passed, 1 undecided."
    entry = check("fusion")
    assert report.closing(build([(entry, None)])).startswith("1 of 1 checks gave no result, so there is no verdict")
    assert "all 1 planned checks were deselected" in report.closing(build([(entry, None)], selected=set()))
    assert report.closing(build([], problems=["stop raised X"])) == "Fault: stop raised X"


def test_failure_text_shows_the_steps_and_the_worst_element():
    entry, outcome = full_run()[1]
    text = report.failure(entry | results.clean(outcome, entry), "pytest this", "my.py:3 in f: x")
    assert text.splitlines()[0] == "error 41.2 x its bound [mtp-float32-tame]"
    for part in ("index   [0, 4]", "bound   0.001", "at      my.py:3 in f: x", "repeat  pytest this"):
        assert part in text


# -- what the hash of the suite covers -------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


def copy_of_the_suite(root: Path) -> Path:
    for folder in DECIDING:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def copied(tmp_path):
    return copy_of_the_suite(tmp_path / "suite")


CHANGES = [
    ("conformance/protocol/description.py", '"float32")', '"float16")'),  # default formats
    ("conformance/checks/stages.py", "STEP = 3", "STEP = 2"),
    ("conformance/judging/compare.py", "return self.ratio <= 1", "return self.ratio < 1"),
    ("reference/ops.py", "np.exp", "np.exp2"),
]


@pytest.mark.parametrize(("file", "old", "new"), CHANGES)
def test_hash_changes_with_what_decides_a_verdict(copied, file, old, new):
    text = (copied / file).read_text(encoding="utf-8")
    assert old in text
    (copied / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    assert content_hash(copied) != suite()["hash"]


def test_hash_does_not_change_with_words_places_or_the_report(copied):
    file = copied / "conformance" / "checks" / "stages.py"
    text = re.sub('^"""(?s:.*?)"""', '"""Other words."""\n\nimport json', file.read_text(encoding="utf-8"))
    (copied / "conformance" / "checks" / "inner").mkdir()
    file.unlink()
    (copied / "conformance" / "checks" / "inner" / "moved.py").write_text(f"# A comment.\n{text}", encoding="utf-8")
    (copied / "conformance" / "report").mkdir()
    (copied / "conformance" / "report" / "new.py").write_text("x = 1\n", encoding="utf-8")
    assert content_hash(copied) == suite()["hash"]


@pytest.mark.parametrize("folder", DECIDING)
def test_a_missing_or_empty_folder_has_no_hash(copied, folder):
    shutil.rmtree(copied / folder)
    with pytest.raises(FileNotFoundError, match=folder):
        content_hash(copied)
    (copied / folder).mkdir()
    with pytest.raises(FileNotFoundError, match=folder):
        content_hash(copied)


# -- verdicts of a process of its own --------------------------------------------------------------------------------


def test_crashes_and_timeouts_are_faults_and_known_deviations_are_not():
    known = PASS | {"verdict": "fail", "ratio": 41.2}
    entry = {"number": 1, "id": "x", "kind": "fail", "reason": "why", "url": "there", "ratio": ["30", "inf"]}
    known |= {"extra": {"deviation": entry | {"until": "2999-01-01"}}, "verdict": "known deviation"}
    plan = [check("fusion"), check("route"), check("head")]
    crash, timeout = (
        PASS | {"verdict": v, "ratio": None, "message": f"{v}!", "extra": {}} for v in ("crash", "timeout")
    )
    for outcomes, verdict in (((known, crash, timeout), "fault found"), ((known,), "no fault found")):
        entries = plan[: len(outcomes)]
        got = results.build(
            plan=entries, outcomes={e["id"]: o for e, o in zip(entries, outcomes, strict=True)},
            selected={e["id"] for e in entries}, subject=SUBJECT, adapter="a", seed=0,
            env={"python": "3.11.0", "numpy": "2.4.0", "torch": None},
            selection={"stage": None, "policy": None, "pyargs": False},
            isolation=results.IN_PROCESS | {"isolated": True, "timeout": 5.0, "memory": 0.0, "options": "--memory 0"},
            notes=["route left a timer changed"],
        )  # fmt: skip
        assert got["verdict"] == verdict
        assert got["counts"]["executed"] == len(outcomes)
        page = markdown(got)
        assert "| fail | 41 | 30 to inf | why | there | 2999-01-01 |" in page
        assert "| process of its own | 5 s a call, as much memory as there is |" in page
        assert "| note | route left a timer changed |" in page
        if verdict == "fault found":
            assert got["first_fault"]["sentence"].startswith("First fault: stage unroll (output): crash!")
            assert got["first_fault"]["repeat"].endswith("--seed 0 --memory 0")


def test_outcome_cannot_declare_itself_a_known_deviation():
    with pytest.raises(ValueError, match="not for a check to say"):
        results.clean(PASS | {"verdict": "known deviation"}, check("attention"))
