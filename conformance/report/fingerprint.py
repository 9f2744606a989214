"""Which suite judged: its version and a hash of all that decides a verdict."""

import hashlib
from functools import cache
from pathlib import Path

from draftconf import __version__

from ..protocol.description import PROTOCOL

#: Folders that a verdict hangs on.
DECIDING = ("conformance/checks", "conformance/judging", "reference")


def suite() -> dict:
    """Version of the suite, and a hash of all that decides a verdict: stages, cases, checks and the oracle."""
    return {"version": __version__, "hash": content_hash(Path(__file__).parents[2]), "protocol": PROTOCOL}


@cache
def content_hash(root: Path) -> str:
    digest = hashlib.sha256()
    for source in [path for folder in DECIDING for path in sorted((root / folder).glob("*.py"))]:
        text = source.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{source.parent.name}/{source.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]
