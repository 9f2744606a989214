"""Which suite judged: its version and a hash of all that decides a verdict."""

import ast
import hashlib
from functools import cache
from pathlib import Path

from draftconf import __version__

from ..protocol.description import PROTOCOL

#: Folders that a verdict hangs on, from the folder that has them all.
DECIDING = ("conformance/protocol", "conformance/checks", "conformance/judging", "reference")


def suite() -> dict:
    """Version of the suite, and a hash of all that decides a verdict: protocol, checks, comparisons and the oracle."""
    return {"version": __version__, "hash": content_hash(Path(__file__).resolve().parents[2]), "protocol": PROTOCOL}


@cache
def content_hash(root: Path) -> str:
    """Of what the code means: comments, docstrings, imports and the names of files do not count.

    Raises FileNotFoundError for a folder that is missing or has no code, since its hash would say nothing.
    """
    return hashlib.sha256("\n".join(sorted(meaning(root))).encode()).hexdigest()[:12]


def meaning(root: Path):
    """The syntax tree of every file of the deciding folders, as text."""
    for folder in DECIDING:
        files = sorted((root / folder).rglob("*.py"))
        if not files:
            raise FileNotFoundError(f"{root / folder} has no code; wanted the folders {', '.join(DECIDING)}")
        for file in files:
            yield ast.dump(Bare().visit(ast.parse(file.read_text(encoding="utf-8"))))


class Bare(ast.NodeTransformer):
    """A syntax tree without docstrings and imports."""

    def visit_Import(self, node):
        return None

    visit_ImportFrom = visit_Import

    def visit_Expr(self, node):
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)
