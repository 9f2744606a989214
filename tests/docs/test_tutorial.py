"""The tutorial, command by command, in an environment of its own; and the action's script, as a runner would run it."""

import json
import os
import re
import shutil
import site
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"(?:^<!-- exit (\d+) -->\n)?^```sh\n(.*?)^```$", re.M | re.S)
BUILT_FROM = ("draftconf", "conformance", "fast", "reference", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What a package is built from, without what lies around in a working tree."""
    root = tmp_path_factory.mktemp("clone") / "draftconf"
    root.mkdir()
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    return root


@pytest.fixture(scope="module")
def environment() -> dict:
    """pip finds numpy, torch, pytest and setuptools where these tests have them, and asks nobody else."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PIP", "GITHUB", "VIRTUAL_ENV"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join(site.getsitepackages()),
        "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def blocks() -> list[tuple[int, str]]:
    """Expected exit code and commands of each shell block."""
    return [(int(code or 0), text) for code, text in BLOCK.findall(TUTORIAL.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def transcript(clone, environment) -> list[tuple[int, int, str]]:
    """Every block in one shell after the other, as a reader would: expected code, code, output."""
    marks = [f"echo '--- block {i}'; " for i in range(len(blocks()))]
    script = "".join(f'{mark}\n{text}echo "--- code $?"\n' for mark, (_, text) in zip(marks, blocks(), strict=True))
    done = subprocess.run(
        ["bash"], input=script, cwd=clone, env=environment, text=True, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    parts = re.findall(r"--- block \d+\n(.*?)--- code (\d+)\n", done.stdout, re.S)
    assert len(parts) == len(blocks()), done.stdout
    return [(wanted, int(code), said) for (wanted, _), (said, code) in zip(blocks(), parts, strict=True)]


def test_every_command_ends_as_the_page_says(transcript):
    for wanted, code, said in transcript:
        assert code == wanted, said


def test_what_the_page_quotes_is_what_comes(transcript):
    said = " ".join("\n".join(text for _, _, text in transcript).split())
    for quoted in (
        "No fault found",
        "First fault: stage lk_loss (loss): error",
        "x its bound; smallest input: draft_logits = [0, 200], target_logits = [200, 0] [eagle3-float32-extreme]. "
        "Repeat: conform run",
        "since the earlier run: 6 fixed",
    ):
        assert quoted in said
        assert quoted.partition(": conform")[0] in " ".join(TUTORIAL.read_text(encoding="utf-8").split())


def test_files_that_the_page_names_are_there(transcript, clone):
    folder = clone.parent / "try-conform"
    for name in ("before.json", "after.json", "report.html", "REPORT.md", "badge.json"):
        assert (folder / name).stat().st_size > 0
    assert "<style>" in (folder / "report.html").read_text(encoding="utf-8")  # from the installed package's files


def test_tutorial_is_no_longer_than_ten_minutes_of_reading_and_typing():
    text = TUTORIAL.read_text(encoding="utf-8")
    assert len(blocks()) <= 12
    assert len(text.split()) < 900


# -- the action --------------------------------------------------------------------------------------------------------


def action_script() -> str:
    """The text under the last ``run: |`` of action.yml."""
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    body = text.rpartition("      run: |\n")[2]
    return "".join(line[8:] if line.strip() else line for line in body.splitlines(keepends=True))


@pytest.mark.parametrize(("adapter", "code", "verdict"), [
    ("reference", 0, "no fault found"), ("nonesuch", 2, None), ("$(touch hacked)", 2, None),
])  # fmt: skip
def test_action_runs_reports_and_fails_as_it_should(transcript, clone, environment, tmp_path, adapter, code, verdict):
    inputs = {"ADAPTER": adapter, "STAGES": "lk_loss", "POLICIES": "", "DEVIATIONS": "", "COMPARE": "",
              "ARGUMENTS": "-q -x", "OUTPUT": "conformance-report"}  # fmt: skip
    runner = {"GITHUB_OUTPUT": str(tmp_path / "out"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    path = f"{clone / '.venv-try' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", action_script()], cwd=tmp_path, text=True,
        env=environment | inputs | runner | {"PATH": path}, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert not (tmp_path / "hacked").exists()
    if verdict is None:
        return
    assert (tmp_path / "out").read_text() == f"verdict={verdict}\n"
    assert "no fault found" in (tmp_path / "summary").read_text(encoding="utf-8").splitlines()[0]
    left = {path.name for path in (tmp_path / "conformance-report").iterdir()}
    assert left == {"results.json", "REPORT.md", "report.html", "badge.json", "junit.xml"}
    assert json.loads((tmp_path / "conformance-report" / "badge.json").read_text())["color"] == "yellow"


def test_action_hands_every_input_over_by_the_environment():
    assert "${{" not in action_script()
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    for name in re.findall(r"^  (\w+):\n    description", text.partition("outputs:")[0], re.M):
        assert f"inputs.{name}" in text
