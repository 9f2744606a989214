"""The one way to a file."""

import json
import os
from pathlib import Path


def as_json(value: dict) -> str:
    """Raises ValueError for a number that is not finite."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def as_rows(value: dict) -> str:
    """The same, long lists with a line for each item: tables that a reader can search and a diff can show."""
    parts = (f"{json.dumps(key)}: {_rows(item)}" for key, item in value.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rows(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    return "[\n " + ",\n ".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"


def write(path: str | Path, text: str) -> None:
    """By renaming, so that a run cut short leaves the old file and never half a new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
