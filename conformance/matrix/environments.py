"""An environment of its own for each package, in ``.venvs/<package>``, on top of shared ones that are on disk once.

An environment is built anew when what it is made of has changed: the pins, those of its bases, or the interpreter.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .packages import Package

STAMP = ".stamp"


class BuildError(Exception):
    """An environment cannot be built; the message says why in one sentence."""


@dataclass(frozen=True)
class Builder:
    """Builds below ``folder`` from the files below ``requirements`` (``<package>.txt``, ``bases/<base>.txt``)."""

    folder: Path
    requirements: Path
    rebuild: bool = False

    def build(self, package: Package) -> Path:
        """The folder of the package's environment, built if need be. Raises BuildError."""
        bases = [self._base(name) for name in package.bases]
        pins = self.requirements / f"{package.name}.txt"
        return self._environment(package.name, pins, bases, package.options, "--no-deps")

    def _base(self, name: str) -> Path:
        """A shared one: with dependencies, and never rebuilt but for its own pins."""
        shared = Builder(self.folder, self.requirements)
        return shared._environment(f"base-{name}", self.requirements / "bases" / f"{name}.txt", [])

    def _environment(self, name: str, pins: Path, bases: list[Path], options=(), *flags: str) -> Path:
        if not pins.is_file():
            raise BuildError(f"there is no file {pins.name} with its pins in {shown(pins.parent)}")
        place, stamp = self.folder / name, stamp_of(pins, bases, options)
        if not self.rebuild and read(place / STAMP) == stamp:
            return place
        shutil.rmtree(place, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(place)], f"no environment {shown(place)} could be made")
        stand_on(place, bases)
        install = [str(python_of(place)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*install, *flags, *options, "-r", str(pins)], f"the pins in {pins.name} could not be installed")
        (place / STAMP).write_text(stamp, encoding="utf-8")  # last: without it the next run starts over
        return place


def stamp_of(pins: Path, bases: list[Path], options: tuple) -> str:
    """A hash of all that an environment is made of, pip's options among it."""
    digest = hashlib.sha256(f"{sys.version} {[read(base / STAMP) for base in bases]} ".encode())
    digest.update(" ".join(options).encode())
    digest.update(pins.read_bytes())
    return digest.hexdigest()


def stand_on(place: Path, bases: list[Path]) -> None:
    """Let the environment import what the bases hold, after what it holds itself."""
    lines = [f"{site_packages(base).resolve()}\n" for base in bases]
    (site_packages(place) / "bases.pth").write_text("".join(lines), encoding="utf-8")


def site_packages(place: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place), "platbase": str(place)}))


def python_of(place: Path) -> Path:
    return place / "bin" / "python"


def run(command: list[str], failure: str) -> None:
    """Run to the end. Raises BuildError with ``failure`` and the last line that tells why."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_NO_INPUT": "1"})
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR:")] or said[-1:]
        raise BuildError(": ".join([failure, *errors[-1:]]))


def read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def shown(path: Path) -> str:
    """Relative to the current folder where it lies below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
