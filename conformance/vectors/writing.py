"""Writing the vectors: into a temporary directory beside the one that was asked for, and renamed when it is whole."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..checks import plan as checks
from ..protocol.description import Description
from . import manifest, tensors
from .expected import Expected, expect
from .record import narrowed, record

DEFAULT = {"name": "test vectors", "formats": {"storage": "float32"}}
POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*")


def export(directory, *, description: Mapping | None = None, stages=None, seed: int = 0, full: bool = False) -> dict:
    """Write the vectors to ``directory``, which must not exist yet, and return the manifest.

    ``description`` is what an adapter's describe() would say: formats or policies, choices, layouts, documents; float32
    and the default choices if absent. ``stages`` narrows the vectors by stage, with globs. Raises ValueError with a
    sentence.
    """
    directory = Path(directory)
    if os.path.lexists(directory):
        raise ValueError(f"{directory} exists already; name a directory that does not")
    if not directory.parent.is_dir():
        raise ValueError(f"there is no directory {directory.parent} to write {directory.name} into")
    described = Description.from_dict(DEFAULT if description is None else description)
    for policy in described.policies:
        if not POLICY.fullmatch(policy):
            raise ValueError(f"the policy {policy!r} cannot name files; wanted letters, digits, '.' and '_'")
    stages = None if stages is None else list(stages)
    vectors = record(narrowed(checks.plan(described, seed=seed), stages), described)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        written = _write_all(partial, vectors, described, seed, stages, full)
        partial.chmod(0o777 & ~_umask())
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written


def _write_all(root: Path, vectors: list, described: Description, seed: int, stages, full: bool) -> dict:
    files, where = manifest.layout_of(vectors)
    entries, configs, subject = [], {}, Expected(described)
    listed = [_write(root, path, arrays) for path, arrays in files.items()]
    for vector in vectors:
        answer, expected = expect(vector, subject, seed, full)
        entry = manifest.entry_of(vector, where[vector.name], configs, answer)
        listed.append(_write(root, entry["expected"], expected))
        entries.append(entry)
    written = manifest.build(
        description=described, seed=seed, stages=stages, full=full, configs=configs, files=listed, vectors=entries
    )
    text = json.dumps(written, indent=1, allow_nan=False) + "\n"
    (root / manifest.NAME).write_text(text, encoding="utf-8", newline="\n")
    return written


def _write(root: Path, path: str, arrays: dict) -> dict:
    data = tensors.dumps(arrays)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)
    return manifest.file_entry(path, data, arrays)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
