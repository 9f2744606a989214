"""What the texts of the repository cite is there: documents, sections of the two numbered pages, links."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {".md", ".py", ".toml", ".mk", ".yml", ".yaml", ".txt", ".cpp", ".h", ".c", ".sh"}
#: Pages that docs/pages.py writes from tables, the name of an option's value, and files that a run writes.
WRITTEN = {"index.md", "stages.md", "options.md", "faults.md", "modules.md", "FILE.md", "summary.md"}
DOCUMENT = re.compile(r"(?<![\w./$-])[\w./-]*\w\.md\b")
SECTIONS = re.compile(r"\b(spec|mx)\.md(?:\]\([^)]*\))?,?(?: sections?)? (\d+(?:(?:, | and | to )\d+)*)")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)]*))?\)")


@cache
def files() -> tuple[Path, ...]:
    """Every text of the repository, without what builds and tools leave in it."""
    found = (path for path in ROOT.rglob("*") if path.suffix in TEXTS or path.name == "Makefile")
    return tuple(path for path in sorted(found) if is_source(path.relative_to(ROOT)))


def is_source(path: Path) -> bool:
    return not any(part.startswith(".") or part in ("build", "dist", "__pycache__") for part in path.parts)


def prose(path: Path) -> str:
    """The text; of a test, whose strings name files that it writes, the comments and docstrings only."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py" or "tests" not in path.parts:
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def missing_documents(text: str) -> list[str]:
    """Names of documents that no file of the repository has, by its name or the end of its path."""
    paths = ["/" + path.relative_to(ROOT).as_posix() for path in files() if path.suffix == ".md"]
    names = {
        name.removeprefix("../").removeprefix("./") for name in DOCUMENT.findall(re.sub(r"https?://\S+", "", text))
    }
    return sorted(n for n in names if Path(n).name not in WRITTEN and not any(p.endswith("/" + n) for p in paths))


@cache
def sections(page: str) -> set[int]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return {int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)}


def missing_sections(text: str) -> list[str]:
    cited = [(page, int(n)) for page, numbers in SECTIONS.findall(text) for n in re.findall(r"\d+", numbers)]
    return [f"{page}.md {number}" for page, number in cited if number not in sections(page)]


def anchors(path: Path) -> set[str]:
    """The ids that GitHub and mkdocs give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path, text: str) -> list[str]:
    """Relative links whose file is not there, or has no such heading."""
    dead = []
    for name, anchor in LINK.findall(text):
        target = path.parent / name if name else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(f"{name}#{anchor}" if anchor else name)
    return dead


def places(check) -> list[str]:
    """ "file: what ``check`` objects to" for every text."""
    return [f"{path.relative_to(ROOT)}: {fault}" for path in files() for fault in check(path)]


def test_every_document_that_is_named_is_there():
    assert not places(lambda path: missing_documents(prose(path)))


def test_every_section_that_is_cited_is_there():
    assert not places(lambda path: missing_sections(prose(path)))


def test_every_relative_link_of_a_page_leads_somewhere():
    assert not places(lambda path: dead_links(path, path.read_text("utf-8")) if path.suffix == ".md" else [])


def test_no_data_outside_the_repository_is_cited():
    outside = re.compile(r"bugs\.json")
    assert not places(lambda path: outside.findall(prose(path)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see nowhere.md", "nowhere.md"),
        ("docs/README.md", "docs/README.md"),
        ("spec.md section 10", None),
        ("docs/bounds.md and https://example.org/other.md", None),
    ],
)
def test_a_missing_document_is_noticed(text, fault):
    assert missing_documents(text) == ([fault] if fault else [])


@pytest.mark.parametrize(
    "text", ["spec.md section 10", "spec.md 3, 10", "spec.md sections 3 to 10", "spec.md 3 and 10"]
)
def test_a_missing_section_is_noticed(text):
    assert missing_sections(text) == ["spec.md 10"]
    assert missing_sections("[mx.md](mx.md), section 4") == ["mx.md 4"]


def test_a_dead_link_is_noticed():
    page = ROOT / "docs" / "spec.md"
    text = "[a](mx.md) [b](mx.md#nothing) [c](gone.md) [d](https://example.org/e.md) [e](#9-choices)"
    assert dead_links(page, text) == ["mx.md#nothing", "gone.md"]
