"""The one way to a file."""

import json
import os
from pathlib import Path


def as_json(value: dict) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def write(path, text: str) -> None:
    """By renaming, so that a run cut short leaves the old file and never half a new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
