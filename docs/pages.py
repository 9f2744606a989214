"""Write the pages of the documentation: python docs/pages.py FOLDER. `make docs` builds a site of them.

Stages, options and hunted faults come from the tables that the suite itself runs on, modules from their docstrings, so
that none of it can be out of date.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from draftconf.conformance.catalogue.descriptions import Described, boundaries, methods  # noqa: E402
from draftconf.conformance.catalogue.faults import FAULTS  # noqa: E402
from draftconf.conformance.options import OPTIONS  # noqa: E402
from reports.pages import PAGES  # noqa: E402

PACKAGES = ("reference", "conformance", "fast")


def main(folder: str) -> None:
    out = Path(folder)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    written = {"index.md": (ROOT / "README.md").read_text(encoding="utf-8")}
    written |= {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    written |= {Path(page.path).name: measured(page.path, page.stale()) for page in PAGES}
    written |= {"stages.md": stages(), "options.md": options(), "faults.md": faults(), "modules.md": modules()}
    for name, text in written.items():
        (out / name).write_text(within(text, set(written)), encoding="utf-8")


def measured(path: str, stale: str) -> str:
    """A generated page; where this suite, or what it judges, is another one by now, its first paragraph says so."""
    head, rest = (ROOT / path).read_text(encoding="utf-8").split("\n", 1)
    return f"{head}\n\n*{stale}.*\n{rest}" if stale else f"{head}\n{rest}"


def within(text: str, pages: set[str]) -> str:
    """Links to other pages of the site, and none to files that are not on it."""
    head = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")

    def changed(match: re.Match) -> str:
        name = Path(match[2]).name
        return f"[{match[1]}]({name}{match[3] or ''})" if name in pages else match[1]

    return head.sub(changed, text)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def stages() -> str:
    def row(stage: Described) -> list[str]:
        return [f"`{stage.name}`", stage.equation, stage.source, code(stage.inputs),
                code((*stage.outputs, *stage.decisions)), ", ".join(stage.layouts)]  # fmt: skip

    head = ["name", "equation", "source", "inputs", "outputs and decisions", "layouts"]
    return f"""# Stages

From the stage table (`conformance/checks/stages.py`) and the oracle's wiring (`reference/layer.py`);
`conform stages NAME` too shows it.

## Methods that an adapter may offer

{table(head, [row(stage) for stage in methods()])}

## Boundaries of the trace

In data order. A boundary is recorded as `"step/name"`, its cotangent as `"step/name.grad"`. Dotted names are optional.

{table(head, [row(stage) for stage in boundaries()])}
"""


def options() -> str:
    rows = [
        [code([f"{o.flag} {o.metavar}" if o.metavar else o.flag, *([o.negative] if o.negative else [])]), f"`{o.ini}`",
         "" if o.default is None else str(o.default), o.help]
        for o in OPTIONS
    ]  # fmt: skip
    head = ["option", "ini value", "default", "meaning"]
    return f"# Options\n\nThe command line wins over the ini file.\n\n{table(head, rows)}\n"


def faults() -> str:
    rows = [[fault.what, code(fault.where), fault.source, fault.exposed] for fault in FAULTS]
    head = ["fault", "checks (stage.quantity)", "seen in", "shown by"]
    intro = "Faults that public code has had. `conform explain CHECK_ID` tells those of one check."
    return f"# What is hunted\n\n{intro}\n\n{table(head, rows)}\n"


def modules() -> str:
    parts = ["# Modules\n\nFrom their docstrings."]
    for package in PACKAGES:
        parts.append(f"## {package}")
        for path in sorted((ROOT / package).rglob("*.py")):
            if not {"adapters", "findings"} & set(path.parts) and not path.name.startswith("test_"):
                parts += module(path)
    return "\n\n".join(parts) + "\n"


def module(path: Path) -> list[str]:
    """Its docstring, and a line for each public function and class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree)
    if not docstring:
        return []
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    lines = [
        f"- `{node.name}{arguments(node)}`: {first_line(node)}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node)
    ]
    return [f"### {name}", fenced(docstring), *(["\n".join(lines)] if lines else [])]


def arguments(node) -> str:
    return f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""


def first_line(node) -> str:
    return ast.get_docstring(node).splitlines()[0].replace("<", "&lt;")


def fenced(text: str) -> str:
    """As it stands in the source: docstrings are plain text, with formulas and tables of their own."""
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    main(sys.argv[1])
