"""What counts as a change of verdicts, what a file of them must hold, and where the answers of a revision come from."""

import json
import subprocess
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from draftconf.conformance.evidence import power, same_verdicts
from draftconf.conformance.evidence.mutants import MUTANTS
from draftconf.conformance.evidence.same_verdicts import compare, read, store

CHECK = "moe.output.stage[mtp-float32-tame]"
MACHINE = {"platform": "Linux x86_64 AVX2", "numpy": "2.0", "torch": "2.11"}


def file_of(**fields) -> dict:
    """One subject with a failing check, its fields as given, and a passing one."""
    failing = {"verdict": "fail", "ratio": 3.0, "first_step": 2, "blamed": "moe", "direction": "forward", "compared": 8}
    checks = {CHECK: failing | fields, "head.logits.stage[mtp-float32-tame]": {"verdict": "pass", "ratio": 0.25}}
    subjects = {"mutant one": {"first fault": CHECK, "checks": checks}}
    return {"format": 1, "commit": "abc", "machine": MACHINE, "subjects": subjects}


def checks_of(data: dict) -> dict:
    return data["subjects"]["mutant one"]["checks"]


# -- compare -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "was", "now"),
    [
        ("verdict", "fail", "pass"),
        ("verdict", "fail", "undecided"),
        ("first_step", 2, 3),
        ("first_step", 2, None),
        ("blamed", "moe", "route"),
        ("direction", "forward", "backward"),
        ("says", "output is # x its bound", "output is not finite"),
        ("compared", 8, 7),
        ("decisions", {"total": 8, "flipped": 1}, {"total": 8, "flipped": 2}),
        ("ratio", 3.0, 3.0 * (1 + 1e-11)),
        ("ratio", 0.0, 1e-300),
        ("ratio", 3.0, None),
        ("ratio", 3.0, "inf"),
        ("ratio", "inf", "nan"),
        ("ratio", "inf", "-inf"),
        ("ratio", "nan", 1.0),
        ("width", 0.2, 0.2 * (1 - 1e-11)),
        ("width", 0.2, None),
        ("bias", 1.5, None),
    ],
)
def test_what_changed_is_named_with_both_sides(field, was, now):
    [line] = compare(file_of(**{field: was}), file_of(**{field: now}))
    assert line == f"mutant one: {CHECK}: {field} {was} before; {field} {now} now"


@pytest.mark.parametrize(
    ("was", "now"), [(3.0, 3.0 * (1 + 1e-13)), (3, 3.0), ("inf", "inf"), ("nan", "nan"), (None, None), (0.0, -0.0)]
)
@pytest.mark.parametrize("field", ["ratio", "bias", "width"])
def test_the_same_number_is_no_change(field, was, now):
    assert compare(file_of(**{field: was}), file_of(**{field: now})) == []


def test_a_check_added_or_removed_is_a_change():
    more, fewer = file_of(), file_of()
    del checks_of(fewer)[CHECK]
    assert compare(more, fewer)[0].startswith(f"mutant one: {CHECK}: removed, verdict fail")
    assert compare(fewer, more)[0].startswith(f"mutant one: {CHECK}: added, verdict fail")


def test_another_first_fault_is_a_change():
    other = file_of()
    other["subjects"]["mutant one"]["first fault"] = None
    assert compare(file_of(), other) == [f"mutant one: first fault {CHECK} before, None now"]


def test_a_subject_added_or_removed_is_one_line():
    more = file_of()
    more["subjects"]["twin two"] = deepcopy(more["subjects"]["mutant one"])
    assert compare(file_of(), more) == ["twin two: added"]
    assert compare(more, file_of()) == ["twin two: removed"]


@pytest.mark.parametrize("key", MACHINE)
def test_files_of_two_machines_are_not_compared(key):
    other = file_of() | {"machine": MACHINE | {key: "another"}}
    with pytest.raises(ValueError, match=f"cannot be compared: .*{key} {MACHINE[key]}.*{key} another"):
        compare(file_of(), other)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was_and_nothing_else_is_left(tmp_path):
    store(tmp_path / "new" / "file.json", file_of(ratio="nan"))
    assert read(tmp_path / "new" / "file.json") == file_of(ratio="nan")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    store(path, file_of())
    with pytest.raises(ValueError, match="Out of range"):
        store(path, file_of(ratio=float("nan")))
    assert read(path) == file_of()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "no file of same_verdicts"),
        ('{"format": 1}', "nothing was asked"),
        ('{"format": 2}', "no file of same_verdicts in format 1"),
        (json.dumps(file_of() | {"subjects": {}}), "nothing was asked"),
        (json.dumps(file_of() | {"subjects": {"fast": {"first fault": None, "checks": {}}}}), "nothing was asked"),
    ],
)
def test_a_file_without_verdicts_is_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read(path)


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read(tmp_path / "none.json")


# -- the sample and what is kept ---------------------------------------------------------------------------------------


def test_the_sample_is_spread_and_does_not_hang_on_the_order(monkeypatch):
    mutants, twins = same_verdicts.sampled_mutants(), same_verdicts.sampled_twins()
    for what in ("area", "direction", "layout", "policy"):
        assert {getattr(mutant, what) for mutant in mutants} == {getattr(mutant, what) for mutant in MUTANTS}
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 40
    assert any(mutant.stage == "unroll" and not mutant.methods for mutant in mutants)
    assert len(set(twins)) == 20
    assert {layout for _, layout, _ in twins} == set(power.LAYOUTS)
    assert {policy for *_, policy in twins} == {"float64", "float32", "bfloat16"}
    monkeypatch.setattr(same_verdicts, "MUTANTS", MUTANTS[::-1])
    assert {mutant.name for mutant in same_verdicts.sampled_mutants()} == {mutant.name for mutant in mutants}


def test_all_faults_of_a_mutant_are_kept():
    mutant = next(mutant for mutant in MUTANTS if mutant.methods)
    name, found = same_verdicts.ask(("mutant", mutant.name))
    failing = [entry for entry in found["checks"].values() if entry["verdict"] in ("fail", "error")]
    assert name == f"mutant {mutant.name}"
    assert found["checks"][found["first fault"]] in failing
    assert len(failing) == power.run_mutant(mutant).failing
    assert all(entry["blamed"] and entry["direction"] and entry["says"] for entry in failing)


def test_what_was_asked_before_leaves_the_answers_alone(monkeypatch):
    draws = []
    monkeypatch.setattr(same_verdicts, "of_twin", lambda *where: draws.append(float(torch.rand(()))))
    same_verdicts.ask(("twin", "a", "mtp", "float32"))
    same_verdicts.ask(("twin", "a", "mtp", "float32"))
    assert draws[0] == draws[1]


def test_a_message_is_kept_without_numbers_and_traceback():
    raised = "mxfp4 raised ValueError: width -3.5e-07 of 16, infops.py:12 in f: x / 0\nmx.py:7 in g: y"
    assert same_verdicts.message_kind(raised) == "mxfp4 raised ValueError: width # of #, "
    assert same_verdicts.message_kind("error inf x its bound 1.3e+05") == "error # x its bound #"


# -- revisions ---------------------------------------------------------------------------------------------------------


COLLECTOR = """import sys, pathlib
pathlib.Path(sys.argv[2]).write_text(pathlib.Path("answers.json").read_text())
print("collected")
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Three commits: without a collector, with one that copies a file, and with other answers."""

    def commit(files: dict) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one more")

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    data = file_of() | {"machine": same_verdicts.machine()}
    git("init", "-q")
    package = "from pathlib import Path\n__path__.append(str(Path(__file__).parents[1]))\n"
    commit({".gitignore": "build/", "draftconf/__init__.py": package})
    commit({same_verdicts.COLLECTOR: COLLECTOR, "answers.json": json.dumps(data)})
    checks_of(data)[CHECK]["verdict"] = "pass"
    commit({"answers.json": json.dumps(data)})
    monkeypatch.setattr(same_verdicts, "ROOT", tmp_path)
    monkeypatch.setattr(same_verdicts, "collect", lambda: data | {"commit": same_verdicts.described()})
    return SimpleNamespace(path=tmp_path, git=git, commit=commit)


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["same_verdicts", *map(str, arguments)])
    return same_verdicts.main()


def test_a_revision_answers_for_itself_and_only_once(repository, monkeypatch, capfd):
    assert run(monkeypatch, "since", "HEAD~1") == 1
    out = capfd.readouterr().out
    assert out.startswith("collected")
    assert f"Differences: 1:\nmutant one: {CHECK}: verdict fail before; verdict pass now\n" in out
    assert run(monkeypatch, "since", "HEAD~1") == 1
    assert "collected" not in capfd.readouterr().out
    assert repository.git("worktree", "list").count("\n") == 0
    names = {path.name for path in (repository.path / "build" / "verdicts").iterdir()}
    assert names == {f"{repository.git('rev-parse', revision)}.json" for revision in ("HEAD", "HEAD~1")}


def test_the_same_answers_are_said_to_be_the_same(repository, monkeypatch, capfd):
    assert run(monkeypatch, "since", "HEAD") == 0
    assert "Every verdict, blame and ratio is the same." in capfd.readouterr().out


def test_a_stored_file_of_another_machine_is_made_again(repository, monkeypatch, capfd):
    path = repository.path / "build" / "verdicts" / f"{repository.git('rev-parse', 'HEAD')}.json"
    store(path, file_of())
    assert run(monkeypatch, "since", "HEAD") == 0
    assert capfd.readouterr().out.startswith("collected")


@pytest.mark.parametrize(
    ("revision", "sentence"),
    [("HEAD~2", f"has no {same_verdicts.COLLECTOR}"), ("nowhere", "git rev-parse: ")],
)
def test_a_revision_that_cannot_answer_is_a_sentence(repository, monkeypatch, capfd, revision, sentence):
    assert run(monkeypatch, "since", revision) == 2
    assert sentence in capfd.readouterr().err


def test_a_collector_that_fails_is_a_sentence(repository, monkeypatch, capfd):
    repository.commit({same_verdicts.COLLECTOR: "raise SystemExit(3)"})
    assert run(monkeypatch, "since", "HEAD") == 2
    assert "ended with exit status 3" in capfd.readouterr().err
    assert repository.git("worktree", "list").count("\n") == 0


def test_two_files_and_one_against_the_working_tree(repository, monkeypatch, capfd):
    old, new = repository.path / "build" / "old.json", repository.path / "build" / "new.json"
    assert run(monkeypatch, "store", new) == 0
    store(old, read(new))
    assert run(monkeypatch, "compare", old, new) == 0
    assert run(monkeypatch, "compare", old) == 0
    data = read(old)
    data["subjects"] = {f"twin {i}": next(iter(data["subjects"].values())) for i in range(50)}
    store(old, data)
    capfd.readouterr()
    assert run(monkeypatch, "compare", old, new) == 1
    assert "Differences: 51, the first 40:\ntwin 0: removed\n" in capfd.readouterr().out
