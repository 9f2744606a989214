"""Reading what others wrote: strict JSON, and files that lie where they should. Whatever is wrong is one sentence."""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_DEPTH = 32
MAX_MESSAGE = 400
MAX_ENTRIES = 20_000  # in a directory of results
SUFFIX = ".safetensors"


class MalformedError(ValueError):
    """A file that cannot be used; the message is one printable sentence of bounded length."""

    def __init__(self, message: str):
        text = message.encode("ascii", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")
        super().__init__(text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "...")


def shown(value, limit: int = 60) -> str:
    """A name or value from a file, safe to print."""
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


# -- JSON ------------------------------------------------------------------------------------------------------------


def load_json(data: bytes, what: str):
    """One JSON value. Refused: other encodings than UTF-8, duplicate keys, NaN and infinities, deep nesting."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite
        )
        deep = depth(value) > MAX_DEPTH
    except UnicodeDecodeError as error:
        raise MalformedError(f"{what} is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        deep = True
    except ValueError as error:
        raise MalformedError(f"{what} is not JSON that can be read: {error}") from None
    if deep:
        raise MalformedError(f"{what} nests deeper than {MAX_DEPTH} levels")
    return value


def _once(pairs: list) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return found


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is beyond float64")
    return value


def depth(value) -> int:
    """Levels of nesting, without recursion."""
    level, current = 0, [value]
    while current:
        level += 1
        inner = [item.values() if isinstance(item, dict) else item for item in current if isinstance(item, dict | list)]
        current = [item for group in inner for item in group]
    return level


# -- files -----------------------------------------------------------------------------------------------------------


def directory(path, what: str) -> Path:
    path = Path(path)
    if not path.is_dir():
        raise MalformedError(f"{what} {shown(str(path))} is no directory")
    return path


def is_inside(relative: str) -> bool:
    """Whether a path with forward slashes stays below its root on every system."""
    parts = relative.split("/")
    odd = any(c in relative for c in "\\:\0")
    return not odd and all(part not in ("", ".", "..") for part in parts)


def read_file(root: Path, relative: str, limit: int) -> bytes:
    """A regular file below ``root``, reached without a symbolic link, of at most ``limit`` bytes."""
    if not is_inside(relative):
        raise MalformedError(f"the path {shown(relative)} leads outside its directory")
    try:
        path = _without_links(root, relative)
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MalformedError(f"{shown(relative)} is no regular file")
            if status.st_size > limit:
                raise MalformedError(f"{shown(relative)} has {status.st_size} bytes; at most {limit} are read")
            return file.read(limit)
    except FileNotFoundError:
        raise MalformedError(f"there is no file {shown(relative)} in {shown(str(root))}") from None
    except OSError as error:
        raise MalformedError(f"{shown(relative)} cannot be read: {error.strerror}") from None


def _without_links(root: Path, relative: str) -> Path:
    path, parts = root, relative.split("/")
    for number, part in enumerate(parts, start=1):
        path = path / part
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise MalformedError(f"{shown('/'.join(parts[:number]))} is a symbolic link, which is not followed")
    return path


def list_files(root: Path) -> list[str]:
    """Every safetensors file below ``root``, as a path with forward slashes. Symbolic links are refused."""
    found = [path for path in _entries(root) if path.endswith(SUFFIX)]
    return sorted(found)


def _entries(root: Path) -> Iterator[str]:
    waiting, seen = [""], 0
    while waiting:
        below = waiting.pop()
        try:
            entries = sorted(os.scandir(root / below), key=lambda entry: entry.name)
        except OSError as error:
            raise MalformedError(f"{shown(below or '.')} cannot be listed: {error.strerror}") from None
        for entry in entries:
            seen += 1
            if seen > MAX_ENTRIES or below.count("/") > MAX_DEPTH:
                raise MalformedError(f"{shown(str(root))} has more than {MAX_ENTRIES} entries or is nested too deeply")
            if entry.is_symlink():
                raise MalformedError(f"{shown(below + entry.name)} is a symbolic link, which is not followed")
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{below}{entry.name}/")
            else:
                yield below + entry.name
