"""Which suite judged, and what was judged: hashes of meaning. Words, imports and names of files do not count."""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from draftconf import __version__

from ..protocol.description import PROTOCOL
from ..protocol.loading import ENTRY_POINTS, built_in

ROOT = Path(__file__).resolve().parents[2]  # of the folders conformance, fast, reference
#: Folders that a verdict hangs on.
DECIDING = ("conformance/protocol", "conformance/checks", "conformance/judging", "reference")
ADAPTERS = "conformance/adapters"
#: What the adapters of this project's own implementations wrap.
WRAPPED = {"fast": "fast", "fast_fused": "fast", "reference": "reference"}
KERNELS = (".cpp", ".h")


def suite() -> dict:
    """Version of the suite, and a hash of all that decides a verdict: protocol, checks, comparisons and the oracle."""
    return {"version": __version__, "hash": content_hash(ROOT), "protocol": PROTOCOL}


@cache
def content_hash(root: Path) -> str:
    """Of the deciding folders below ``root``: 12 hexadecimal digits.

    Raises FileNotFoundError for a folder that is missing or has no code, since its hash would say nothing.
    """
    files = []
    for folder in DECIDING:
        code = sorted((root / folder).rglob("*.py"))
        if not code:
            raise FileNotFoundError(f"{root / folder} has no code; wanted the folders {', '.join(DECIDING)}")
        files += code
    return digest(files)


def subject_hash(adapter: str, version: str, elsewhere: bool = False) -> str | None:
    """Of what was judged: the adapter's file, those beside it that it imports, and for ``fast`` and ``reference`` their
    folder; for all others, whose code lies elsewhere, the ``version`` that they declare.

    ``elsewhere``: the adapter ran in another interpreter, where a module's name may mean another file. None where
    there is no file to be found.
    """
    file = source(adapter, elsewhere)
    if file is None:
        return None
    files = with_siblings(file)
    wrapped = WRAPPED.get(file.stem) if file.parent == ROOT / ADAPTERS else None
    if wrapped is None:
        return digest(files, version)
    return digest([*files, *(each for each in (ROOT / wrapped).rglob("*") if each.suffix in (".py", *KERNELS))])


def measured(adapter: str = "fast") -> dict:
    """What a file of measurements says of its origin: the suite, and the code that was judged."""
    return {"suite": suite(), "subject": subject_hash(adapter, "")}


def measured_with(data: dict) -> str:
    """The same as a sentence."""
    suite, subject = data["suite"], data["subject"]
    judged = f"on content {subject}" if subject else "the hash of what it judged was not recorded"
    return f"Measured with suite {suite['version']} ({suite['hash']}), {judged}."


def source(adapter: str, elsewhere: bool = False) -> Path | None:
    """The file of an adapter as it is named to --adapter. Nothing is imported."""
    if adapter in built_in():
        return ROOT / ADAPTERS / f"{adapter}.py"
    place = adapter.rpartition(":")[0]
    if place.endswith(".py"):
        file = Path(place).resolve()
        return file if file.is_file() else None
    if elsewhere:
        return None
    plugged_in = [entry.module for entry in entry_points(group=ENTRY_POINTS, name=adapter)]
    return module_file(place or next(iter(plugged_in), ""))


def module_file(name: str) -> Path | None:
    """Where a module lies, by the search path of its first package; no package is imported for it."""
    first, *rest = name.split(".")
    try:
        spec = find_spec(first) if first else None
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    files += [Path(spec.origin)] if spec.origin and not rest else []
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def with_siblings(file: Path) -> list[Path]:
    """The file, and those of its folder that it imports relatively, in turn."""
    files, left = [], [file]
    while left:
        one = left.pop()
        if one in files:
            continue
        files.append(one)
        for node in ast.walk(tree_of(one)):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                beside = (one.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names)
                left += [path for path in beside if path.is_file()]
    return files


# -- meaning -----------------------------------------------------------------------------------------------------------


def digest(files: list[Path], *more: str) -> str:
    """Of what these files mean, in any order, and of further words."""
    return hashlib.sha256("\n".join([*sorted(map(meaning, files)), *more]).encode()).hexdigest()[:12]


def meaning(file: Path) -> str:
    """A Python file's syntax tree without docstrings and imports; another file as it stands."""
    if file.suffix != ".py":
        return file.read_text(encoding="utf-8")
    return " ".join(words(Bare().visit(tree_of(file))))


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def words(node: object) -> Iterator[str]:
    """A syntax tree in the same words by every version of Python: fields that are empty are left out."""
    if isinstance(node, list):
        for item in node:
            yield from words(item)
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if value is not None and value != []:
                yield name
                yield from words(value)
        yield ")"
    else:
        yield repr(node)


class Bare(ast.NodeTransformer):
    """A syntax tree without docstrings and imports."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)
