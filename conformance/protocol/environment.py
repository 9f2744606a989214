"""Versions of what can change a result."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def environment(subject=None) -> dict:
    """Versions that can change a result. torch only if something has imported it.

    Of an adapter in a process of its own they are the versions there; where the suite's differ, they stand beside them.
    """
    own = {"python": platform.python_version(), "numpy": version("numpy"), "torch": torch_version()}
    there = getattr(subject, "versions", None)
    if there is None:
        return own
    return there | {f"suite's {name}": own[name] for name in ("python", "numpy") if own[name] != there[name]}


def torch_version() -> str | None:
    try:
        return version("torch") if "torch" in sys.modules else None
    except PackageNotFoundError:
        return "unknown"
