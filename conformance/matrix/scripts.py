"""The scripts that reproduce findings: ``findings/<package>_<slug>.py``, each about ten lines, with the package alone.

Its docstring is the finding, one sentence. Comment lines tie it to the checks that show it, both with ``*`` and ``?``:

    # checks: mxfp4.scales.exact[*-edges] mxfp8.scales.exact[*-edges]
    # adapters: conformance/adapters/torchao.py:rceil      (left out: all adapters of the package)

It prints what was found and what is wanted, and exits 0 when the fault is there, 1 when it is not.
"""

import ast
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .environments import python_of
from .packages import PACKAGES, Package

FOLDER = Path(__file__).with_name("findings")
SECONDS = 300
REPRODUCED = {0: True, 1: False}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
DECLARED = re.compile(r"^# (checks|adapters): *(.*\S) *$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One finding: its sentence, and patterns of the check ids and adapters that show it."""

    path: Path
    sentence: str
    checks: tuple[str, ...]
    adapters: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "Script":
        """Raises ValueError naming the file that says no sentence or names no check."""
        text = path.read_text(encoding="utf-8")
        sentence = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        declared = {"checks": [], "adapters": []}
        for kind, words in DECLARED.findall(text):
            declared[kind] += words.split()
        if not sentence:
            raise ValueError(f"{path.name} has no docstring; wanted one sentence that says what is wrong")
        if not declared["checks"]:
            raise ValueError(f"{path.name} has no line '# checks: ...'; wanted the ids of the checks that show it")
        return cls(path, sentence, tuple(declared["checks"]), tuple(declared["adapters"] or "*"))

    def explains(self, adapter: str, check_id: str) -> bool:
        return matches(self.adapters, adapter) and matches(self.checks, check_id)

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8").strip()


def matches(patterns, text: str) -> bool:
    """``*`` and ``?`` are wild; a bracket stands for itself, as ids end in one."""
    wild = (re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") for pattern in patterns)
    return any(re.fullmatch(each, text) for each in wild)


def scripts_of(package: Package, packages=PACKAGES, folder: Path = FOLDER) -> list[Script]:
    """The package's own, by name. A script belongs to the longest package name that its name begins with."""
    paths = [path for path in sorted(folder.glob("*.py")) if owner(path, packages) == package.name]
    return [Script.read(path) for path in paths]


def owner(path: Path, packages) -> str | None:
    names = [package.name for package in packages if path.stem.startswith(package.name.replace("-", "_") + "_")]
    return max(names, key=len, default=None)


def run(script: Script, place: Path, variables: dict) -> dict:
    """Run it in the environment at ``place``: is the fault there (None: no answer), what it printed, why no answer."""
    command = [str(python_of(place.resolve())), "-P", str(script.path.resolve())]
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, cwd=elsewhere,
                env={**os.environ, **OFFLINE, **variables},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"reproduced": None, "output": "", "message": f"it did not end in {SECONDS} s"}
    reproduced, said = REPRODUCED.get(done.returncode), done.stderr.strip().splitlines()
    if done.returncode == 1 and said and said[0].startswith("Traceback"):
        reproduced = None  # an exception is no answer, although it exits 1 too
    message = "" if reproduced is not None else f"it ended with {done.returncode}: {''.join(said[-1:])}"
    return {"reproduced": reproduced, "output": done.stdout.strip(), "message": message}
