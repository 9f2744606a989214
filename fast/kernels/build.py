"""Builds the C++ kernels with the system's compiler, once per compiler, machine and source text."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("lk.cpp", "mx.cpp", "situ.cpp")
HEADERS = ("vector.h", "exponential.h", "rows.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-w")
OPENMP = ("-fopenmp",)  # where the compiler has it


def compiler() -> str | None:
    """The C++ compiler that would be used."""
    return shutil.which("g++") or shutil.which("c++")


@cache
def library() -> ctypes.CDLL | None:
    """The built kernels, or None where there is no compiler or it refuses; ``problem`` says which."""
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        _problem.append(getattr(error, "stderr", None) or str(error))
        return None


def problem() -> str:
    """Why ``library`` gives None, else nothing."""
    return "" if library() is not None else _problem[-1]


_problem: list[str] = []
_folders: list[tempfile.TemporaryDirectory] = []  # gone when the process ends


def _built() -> Path:
    if compiler() is None:
        raise OSError("no C++ compiler is found: neither g++ nor c++")
    try:
        return _built_in(_cache_folder())
    except OSError:  # not writable: for this process only
        _folders.append(tempfile.TemporaryDirectory(prefix="draftconf-"))
        return _built_in(Path(_folders[-1].name))


def _built_in(folder: Path) -> Path:
    target = folder / f"kernels-{_digest()}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(target)
    return target


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftconf"


def _digest() -> str:
    """Of the sources, the flags, and what the compiler defines for this machine (its version and instruction sets)."""
    macros = [compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    digest = hashlib.sha256(subprocess.run(macros, capture_output=True, check=True).stdout)
    for name in (*HEADERS, *SOURCES):
        digest.update((HERE / name).read_bytes())
    digest.update(" ".join((compiler(), *FLAGS, *OPENMP)).encode())
    return digest.hexdigest()[:16]


def _compile(target: Path) -> None:
    """Under another name first, so that a process that starts meanwhile never loads half a file."""
    part = target.with_name(f"{target.name}.{os.getpid()}")
    command = [compiler(), *FLAGS, *(str(HERE / source) for source in SOURCES), "-o", str(part)]
    if subprocess.run([*command, *OPENMP], capture_output=True).returncode:
        subprocess.run(command, capture_output=True, check=True, text=True)
    os.replace(part, target)
