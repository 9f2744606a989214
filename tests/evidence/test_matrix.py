"""``conform matrix`` with made-up packages: no network, and nothing of the real ones."""

import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftconf.conformance.matrix import page, scripts
from draftconf.conformance.matrix.__main__ import DATA, PAGE, ROOT, main
from draftconf.conformance.matrix.environments import Builder, BuildError, python_of
from draftconf.conformance.matrix.packages import PACKAGES, Package
from draftconf.conformance.matrix.running import grouped, left_open, tallied

RIGHT = "{folder}/losses.py:right"
WRONG = "{folder}/losses.py:wrong"
LOSSES = """
import torch
from draftconf.conformance.torch_helper import TorchAdapter, stage

def loss(draft, target, factor):
    draft, target = draft.log_softmax(-1), target.log_softmax(-1)
    return -torch.minimum(draft, target).logsumexp(-1) * factor

def made(factor):
    class Loss(TorchAdapter):
        name, formats = "made up", {"storage": "float32"}
        lk_loss = stage(lambda self, t, forced: {"loss": loss(t["draft_logits"], t["target_logits"], factor)},
                        frozen=("target_logits",))
    return Loss()

right, wrong = made(1.0), made(2.0)
"""
SCRIPT = '''
"""The loss is twice what equation 16 says."""
# checks: lk_loss.*
print("found 2, wanted 1")
raise SystemExit({code})
'''


@dataclass(frozen=True)
class Here:
    """In place of a Builder: this interpreter's environment, or a reason why there is none."""

    refused: tuple = ()

    def build(self, package):
        if package.name in self.refused:
            raise BuildError(f"the pins in {package.name}.txt could not be installed")
        return Path(sys.prefix)


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    """Run the command on packages given as name=adapters; returns its exit code and what it wrote."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "findings").mkdir()

    def run(*names, refused=(), stage="lk_loss", **adapters):
        packages = tuple(
            Package(name.replace("_", "-"), tuple(each.format(folder=tmp_path) for each in specs))
            for name, specs in adapters.items()
        )
        fields = {"builder": Here(refused), "findings": tmp_path / "findings", "out": tmp_path / "build"}
        where = ["--only", stage, "--out", PAGE, "--json", DATA]
        code = main([*names, *where], packages, **fields)
        return code, json.loads(Path(DATA).read_text()), Path(PAGE).read_text()

    run.script = lambda name, code: (tmp_path / "findings" / name).write_text(SCRIPT.format(code=code))
    return run


def test_one_bad_package_does_not_stop_the_rest(matrix):
    adapters = {"unbuilt": (RIGHT,), "unloaded": ("nowhere.py:adapter", RIGHT), "last": (RIGHT,)}
    code, found, text = matrix(refused=("unbuilt",), **adapters)
    unbuilt, unloaded, last = found["packages"]
    assert code == 1
    assert unbuilt["message"] == "the pins in unbuilt.txt could not be installed"
    assert unbuilt["adapters"] == []
    assert "there is no adapter file nowhere.py" in unloaded["adapters"][0]["message"]
    assert unloaded["adapters"][1]["verdict"] == last["adapters"][0]["verdict"] == "no fault found"
    assert "Not run: the pins in unbuilt.txt could not be installed" in text
    assert "`nowhere.py:adapter`: not run: " in text
    assert next(line for line in text.splitlines() if line.startswith("| [unbuilt]")).endswith("| not run |")


def test_a_failing_check_without_a_script_is_unexplained(matrix):
    code, found, text = matrix(made_up=(WRONG,))
    (row,) = found["packages"]
    assert code == 1
    assert row["findings"] == []
    assert (
        {each["id"] for each in row["unexplained"]} == {each["id"] for each in row["adapters"][0]["failing"]} != set()
    )
    assert "### Unexplained" in text
    assert all(f"`{each['id']}`" in text for each in row["unexplained"])


def test_a_finding_is_one_with_its_checks_listed(matrix):
    matrix.script("made_up_twice.py", 0)
    code, found, text = matrix(made_up=(WRONG, RIGHT))
    (finding,) = found["packages"][0]["findings"]
    assert code == 0
    assert found["packages"][0]["unexplained"] == []
    assert finding["reproduced"] is True
    assert finding["output"] == "found 2, wanted 1"
    assert len(finding["checks"]) > 1
    assert finding["smallest"]["input"].startswith("draft_logits = [")
    assert float(finding["worst"]["ratio"]) > 1
    assert text.count("### twice\n\nThe loss is twice what equation 16 says.\n\nReproduced in this run.") == 1
    assert "raise SystemExit(0)" in text
    assert "Unexplained" not in text


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("raise SystemExit(1)", "no longer reproduces"),
        ("raise SystemExit(3)", "gave no answer:** it ended with 3"),
        ("raise ValueError('gone')", "gave no answer:** it ended with 1: ValueError: gone"),
    ],
)
def test_a_script_that_stops_reproducing_is_shown(matrix, body, state):
    matrix.script("made_up_twice.py", 0)
    path = Path("findings/made_up_twice.py")
    path.write_text(path.read_text().replace("raise SystemExit(0)", body))
    code, found, text = matrix(made_up=(RIGHT,))
    assert code == 1
    assert found["packages"][0]["findings"][0]["checks"] == []
    assert state in text
    assert "No failing check of this run shows it" in text


def test_a_partial_run_keeps_the_other_rows(matrix):
    adapters = {"first": (RIGHT,), "second": (WRONG,)}
    _, before, _ = matrix(**adapters)
    code, after, text = matrix("first", refused=("first",), **adapters)
    assert code == 1
    assert after["packages"][1] == before["packages"][1]
    assert after["packages"][0]["message"] != before["packages"][0]["message"] == ""
    assert text == page.markdown(after)


def test_an_explained_check_is_not_unexplained_and_brackets_are_no_wildcards():
    checks = [
        {"id": f"lk_loss.loss.stage[mtp-float32-{case}]", "message": f"{case}; smallest input: x = {n * '0'}"}
        | {"verdict": "fail", "ratio": n, "worst": None}
        for n, case in enumerate(("tame", "harsh", "m"), 1)
    ]
    script = scripts.Script(Path(__file__), "It is wrong.", ("lk_loss.loss.stage[*-tame]", "*-harsh]"), ("one",))
    entry = {"script": "x.py", "sentence": "", "source": "", "reproduced": True, "output": "", "message": ""}
    found = grouped([{"adapter": "one", "failing": checks}, {"adapter": "two", "failing": checks}], [(script, entry)])
    (finding,) = found["findings"]
    assert finding["checks"] == [{"adapter": "one", "id": check["id"]} for check in checks[:2]]
    assert finding["smallest"]["input"] == "x = 0"
    assert finding["worst"]["ratio"] == 2
    assert found["unexplained"] == [{"adapter": "one", "id": checks[2]["id"]}] + [
        {"adapter": "two", "id": check["id"]} for check in checks
    ]


def test_a_finding_in_what_ocp_leaves_open_is_marked():
    assert left_open("fake_mxfp4.y.exact[mtp-float32-nonfinite]")
    assert not left_open("fake_mxfp4.y.exact[mtp-float32-edges]")
    assert not left_open("lk_loss.loss.stage[mtp-float32-clamp]")


def test_counts_put_every_kind_of_fault_among_the_failed():
    checks = [{"stage": "moe", "verdict": verdict} for verdict in ("pass", "fail", "error", "crash", "not offered")]
    counts = tallied(checks, lambda check: check["stage"])["moe"]
    assert counts == {"passed": 1, "failed": 3, "errors": 1, "crashes": 1, "not offered": 1}
    assert page.cell(counts) == "**fail** 3 of 4"
    assert page.cell({"not offered": 2}) == "-"
    assert page.cell({"undecided": 2}) == "undecided 2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["torcha"], "there is no package 'torcha' in the matrix; known: "),
        (["--only", "mxfp4"], "name other files for it with --out and --json"),
        (["--workers", "-1"], "--workers -1: wanted a number of processes"),
        (["--nothing"], "unrecognized arguments: --nothing"),
        (["--json", "broken.json"], "broken.json is no matrix that this suite wrote"),
    ],
)
def test_a_mistake_in_the_command_is_told_before_anything_runs(tmp_path, arguments, said):
    (tmp_path / "broken.json").write_text('{"schema": 1, "packages": [{}]}')
    done = subprocess.run([sys.executable, "-m", "draftconf", "matrix", *arguments], cwd=tmp_path, text=True,
                          capture_output=True, env={"PYTHONPATH": str(ROOT), "PATH": ""})  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"broken.json"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("print(1)", "has no docstring"), ('"""It is wrong."""', "has no line '# checks: ...'")],
)
def test_a_script_that_says_too_little_is_refused(tmp_path, text, said):
    (tmp_path / "made_up_x.py").write_text(text)
    package = Package("made-up", ())
    with pytest.raises(ValueError, match=re.escape(said)):
        scripts.scripts_of(package, (package,), tmp_path)


# -- environments ------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str = "1.0") -> str:
    """A wheel of one module; returns the line that installs it."""
    path, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = '{version}'\n")
        needs = "Requires-Dist: not-on-any-index\n" if name == "top" else ""
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return f"--no-index\n{path}\n"


def test_an_environment_stands_on_its_base_and_is_built_once(tmp_path):
    pins = tmp_path / "pins"
    (pins / "bases").mkdir(parents=True)
    (pins / "bases" / "low.txt").write_text(wheel(tmp_path, "low"))
    (pins / "made-up.txt").write_text(wheel(tmp_path, "top"))
    package = Package("made-up", (), bases=("low",))
    builder = Builder(tmp_path / "envs", pins)

    place = builder.build(package)
    show = [str(python_of(place)), "-c", "import low, top; print(low.__file__); print(top.version)"]
    low, version = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    assert version == "1.0"
    assert "base-low" in low

    (place / "mark").touch()
    assert builder.build(package) == place
    assert (place / "mark").exists()  # nothing was built
    (pins / "made-up.txt").write_text(wheel(tmp_path, "top", "2.0"))
    builder.build(package)
    assert not (place / "mark").exists()
    assert subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()[1] == "2.0"

    (pins / "made-up.txt").write_text(f"--no-index\n{tmp_path}/absent-1.0-py3-none-any.whl\n")
    for _ in range(2):  # what failed is not taken for built the next time
        with pytest.raises(BuildError, match=r"the pins in made-up\.txt could not be installed: ERROR: "):
            builder.build(package)


def test_a_package_without_pins_cannot_be_built(tmp_path):
    with pytest.raises(BuildError, match=r"there is no file made-up\.txt with its pins"):
        Builder(tmp_path, tmp_path).build(Package("made-up", (), bases=()))


# -- what is checked in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_package_has_pins_adapters_and_a_rule(package):
    lines = (ROOT / "requirements" / "matrix" / f"{package.name}.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert any(pin.lower().replace("_", "-").startswith(f"{package.name}==") for pin in pins)
    assert all(pin.count("==") == 1 for pin in pins)
    assert all((ROOT / "requirements" / "matrix" / "bases" / f"{base}.txt").is_file() for base in package.bases)
    for adapter in package.adapters:
        path = adapter.rpartition(":")[0] or f"conformance/adapters/{adapter}.py"
        assert (ROOT / path).is_file()
    assert package.documented.endswith(".")


def test_every_script_belongs_to_a_package_and_says_one_sentence():
    for path in scripts.FOLDER.glob("*.py"):
        assert scripts.owner(path, PACKAGES), f"{path.name} begins with no package's name"
        script = scripts.Script.read(path)
        assert script.sentence.endswith(".")
        assert "draftconf" not in [line.split()[1].split(".")[0] for line in script.source.splitlines()
                                     if line.startswith(("import ", "from "))]  # fmt: skip
