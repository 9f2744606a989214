"""Where an adapter runs and what it may use: ``--isolate``, ``--adapter-python``, ``--call-timeout``, ``--memory``."""

import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

IN_PROCESS = ("fast", "reference")  # built-in adapters that get a process of their own only on request
TIMEOUT, MEMORY = 120.0, 12.0
NEEDED = "import sys, numpy; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed'; print('fit')"


@dataclass(frozen=True)
class Limits:
    """``python`` is an interpreter or the folder of a virtual environment, None for this one.

    ``timeout`` counts seconds of one call, ``memory`` GiB of the process, 0 for no limit. ``options`` are the words of
    the command line that led here.
    """

    isolated: bool = True
    python: str | None = None
    timeout: float | None = TIMEOUT
    memory: float | None = MEMORY
    options: str = ""

    @classmethod
    def of(cls, adapter: str, *, isolate: bool | None, python: str | None, timeout: float | None,
           memory: float | None) -> "Limits":  # fmt: skip
        """From the options, each None where it was not given. Raises ValueError for what does not go together."""
        if python and isolate is False:
            raise ValueError("--adapter-python needs a process of its own, which --no-isolate forbids")
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(f"--call-timeout {timeout:g}: wanted a number of seconds above 0")
        if memory is not None and not 0 <= memory < float("inf"):
            raise ValueError(f"--memory {memory:g}: wanted a number of GiB, or 0 for no limit")
        words = [] if isolate is None else ["--isolate" if isolate else "--no-isolate"]
        words += [] if python is None else ["--adapter-python", shlex.quote(python)]
        words += [] if timeout is None else ["--call-timeout", f"{timeout:g}"]
        words += [] if memory is None else ["--memory", f"{memory:g}"]
        isolated = isolate if isolate is not None else bool(python) or adapter not in IN_PROCESS
        if not isolated:
            return cls(False, None, None, None, " ".join(words))
        timeout, memory = (TIMEOUT if timeout is None else timeout), (MEMORY if memory is None else memory)
        return cls(True, python, timeout, memory, " ".join(words))

    def to_dict(self) -> dict:
        return asdict(self)

    def interpreter(self) -> str:
        """Raises ValueError where there is none."""
        if self.python is None:
            return sys.executable
        path = Path(self.python).expanduser()
        path = path / "bin" / "python" if path.is_dir() else path
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ValueError(f"--adapter-python {self.python}: there is no interpreter {path}")
        why = _unfit(str(path.absolute()))  # a virtual environment's is a link, and works by the name of that link
        if why:
            raise ValueError(f"--adapter-python {self.python}: {why}")
        return str(path.absolute())


@cache
def _unfit(python: str) -> str:
    """Why this interpreter cannot serve an adapter; empty if it can."""
    try:
        asked = subprocess.run([python, "-c", NEEDED], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not start: {error}"
    if asked.stdout.strip() == "fit":
        return ""
    said = [line for line in asked.stderr.splitlines() if line.strip()]
    return f"{python} does not serve: {said[-1] if said else f'it ended with exit code {asked.returncode}'}"
