"""matrix.json, and MATRIX.md as a rendering of it. A run of one package replaces that package's row only."""

import json
from functools import cache
from pathlib import Path

from ..protocol.description import METHODS
from ..report import text as report
from ..report.files import as_json, write
from ..report.schema import validate_against
from .packages import PACKAGES

SCHEMA = 1
INTRODUCTION = """\
# Matrix

Public packages under test, each with the adapters and pins that this repository holds. Every package is judged against
the rule that it documents and its adapter declares; whether that is OCP's default is said apart. `make matrix` writes
this page and `data/matrix.json`; `make matrix PACKAGES="torchao gfloat"` measures these two anew and leaves the others.

A cell has the number of checks: *pass*; *fail* with those that failed of those that ran, an exception, a crash and a
call without an end among them; *undecided* where honest rounding spreads wider than a verdict needs; and - for a stage
that the package does not offer, which is no pass. `unroll` is the walk over the seven steps and the checks end to end.
"""


# -- matrix.json -------------------------------------------------------------------------------------------------------


@cache
def schema() -> dict:
    return json.loads(Path(__file__).with_name("matrix.schema.json").read_text(encoding="utf-8"))


def validate(matrix: dict) -> None:
    """Against matrix.schema.json. Raises ValueError naming the place."""
    validate_against(matrix, schema(), "matrix")


def read(path) -> dict:
    """An earlier matrix, or an empty one where there is no file. Raises ValueError for what is no matrix."""
    path = Path(path)
    if not path.exists():
        return {"schema": SCHEMA, "packages": []}
    try:
        matrix = json.loads(path.read_text(encoding="utf-8"))
        validate(matrix)
    except ValueError as error:  # not JSON, not UTF-8, or not by the schema
        raise ValueError(f"{path} is no matrix that this suite wrote ({error}); remove it or name another") from error
    return matrix


def with_row(matrix: dict, row: dict, packages=PACKAGES) -> dict:
    """The matrix with this row in place of the package's earlier one, in the order of the table of packages."""
    rows = {each["name"]: each for each in matrix["packages"]} | {row["name"]: row}
    return {"schema": SCHEMA, "packages": [rows[package.name] for package in packages if package.name in rows]}


def update(row: dict, json_path, page_path, packages=PACKAGES) -> dict:
    """Put one row into both files, each written whole or not at all. Returns the matrix."""
    matrix = with_row(read(json_path), row, packages)
    validate(matrix)
    write(json_path, as_json(matrix))
    write(page_path, markdown(matrix))
    return matrix


# -- MATRIX.md ---------------------------------------------------------------------------------------------------------


def markdown(matrix: dict) -> str:
    rows = matrix["packages"]
    parts = [INTRODUCTION, table(rows), suites(rows), *map(section, rows)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def table(rows: list[dict]) -> str:
    """Package by stage; stages that no package offers are named below it."""
    present = [stage for row in rows for entry in row["adapters"] for stage in entry.get("stages", {})]
    stages = [*METHODS, *dict.fromkeys(stage for stage in present if stage not in METHODS)]
    lines = [(row, entry) for row in rows for entry in row["adapters"] or [{"adapter": "", "message": row["message"]}]]
    cells = {stage: [cell(entry.get("stages", {}).get(stage, {})) for _, entry in lines] for stage in stages}
    offered = [stage for stage in stages if any(each != "-" for each in cells[stage])]
    absent = [stage for stage in stages if stage not in offered]
    head = ["package", "declares", *offered]
    body = [
        [title(row, entry), rule(entry), *(["not run"] * len(offered) if entry["message"] else
                                           [cells[stage][n] for stage in offered])]
        for n, (row, entry) in enumerate(lines)
    ]  # fmt: skip
    note = f"\nOffered by none of them: {', '.join(absent)}.\n" if absent else ""
    return markdown_table(head, body) + note


def title(row: dict, entry: dict) -> str:
    """The package, and which of its adapters if there are several."""
    several = len(row["adapters"]) > 1
    return f"[{row['name']}](#{row['name']})" + (f" {short(entry['adapter'])}" if several else "")


def short(adapter: str) -> str:
    """``path/to/file.py:attribute`` as ``file:attribute``, another name as it is."""
    place, colon, attribute = adapter.rpartition(":")
    return f"{Path(place).stem}:{attribute}" if colon else adapter


def rule(entry: dict) -> str:
    if entry.get("scale_rule") is None:
        return "-"
    return f"{entry['scale_rule']}, {'' if entry['ocp_default'] else 'not '}OCP's default"


def cell(counts: dict) -> str:
    passed, failed, undecided = (counts.get(status, 0) for status in ("passed", "failed", "undecided"))
    if failed:
        return f"**fail** {failed} of {passed + failed + undecided}"
    if passed:
        return f"pass {passed}" + (f", undecided {undecided}" if undecided else "")
    return f"undecided {undecided}" if undecided else "-"


def suites(rows: list[dict]) -> str:
    """By which version of the suite, where that is not the same for all."""
    known = dict.fromkeys((row["suite"]["version"], row["suite"]["hash"]) for row in rows)
    names = [f"suite {version} ({digest})" for version, digest in known]
    if len(names) < 2:
        return f"All by {names[0]}." if names else ""
    named = [
        f"{', '.join(row['name'] for row in rows if tuple(row['suite'].values()) == each)} by {text}"
        for each, text in zip(known, names, strict=True)
    ]
    return f"Not all by the same suite: {'; '.join(named)}."


def section(row: dict) -> str:
    """All on one package."""
    lines = [f"\n## {row['name']}", ""]
    if row["message"]:
        lines += [f"Not run: {row['message']}", ""]
    versions = dict.fromkeys(entry["version"] for entry in row["adapters"] if not entry["message"])
    urls = dict.fromkeys(entry["url"] for entry in row["adapters"] if not entry["message"])
    if versions:
        lines += [f"Version {', '.join(versions)}, {', '.join(urls)}.", ""]
    if row["documented"]:
        lines += [f"Documented: {row['documented']}", ""]
    lines += [declared(entry) for entry in row["adapters"]]
    lines += ["", "```", *commands(row), "```", ""]
    lines += [
        *walks(row),
        *(line for finding in row["findings"] for line in finding_lines(finding, row["name"])),
        *unexplained(row),
    ]
    if not (row["message"] or row["findings"] or row["unexplained"] or any(e["message"] for e in row["adapters"])):
        lines += ["No fault found.", ""]
    return "\n".join(lines)


def declared(entry: dict) -> str:
    """One adapter: what it declares, and what became of the run."""
    start = f"- `{entry['adapter']}`"
    if entry["message"]:
        return f"{start}: not run: {entry['message']}"
    parts = [f"scale rule {rule(entry)}"] if entry["scale_rule"] else []
    parts += [f"{key} {value}" for key, value in entry["choices"].items() if key != "mx_scale_rule"]
    if entry["silent"]:
        parts.append(f"handled otherwise where OCP is silent: {', '.join(entry['silent'])}")
    counts = [entry["stages"][stage] for stage in entry["stages"]]
    passed, failed = (sum(each.get(status, 0) for each in counts) for status in ("passed", "failed"))
    ran = f"{passed} passed, {failed} failed" + ("" if entry["complete"] else ", a part of the plan")
    notes = "".join(f"\n  - {note}" for note in [*entry["problems"], *entry["notes"]])
    return (
        f"{start}: {'; '.join(parts) or 'all choices default'}; policies {', '.join(entry['policies'])}: {ran}{notes}"
    )


def commands(row: dict) -> list[str]:
    variables = "".join(f"{name}={value} " for name, value in row["variables"].items())
    runs = [
        f"{variables}pytest conformance/ --adapter {entry['adapter']} --adapter-python .venvs/{row['name']}"
        for entry in row["adapters"]
    ]
    return [f"make matrix PACKAGES={row['name']}", *runs]


def walks(row: dict) -> list[str]:
    """The stages of the unroll, for those that offer one."""
    tables = []
    for entry in row["adapters"]:
        cells = [[stage, cell(counts)] for stage, counts in entry.get("walk", {}).items() if cell(counts) != "-"]
        if cells:
            rows = markdown_table(["stage", "checks"], cells).splitlines()
            tables += folded(f"The walk of {entry['adapter']}, stage by stage", rows)
    return tables


STATES = {
    True: "Reproduced in this run.",
    False: "**The script no longer reproduces it.**",
    None: "**The script gave no answer:** ",
}


def finding_lines(finding: dict, package: str) -> list[str]:
    """A finding: the sentence, the smallest input, the size, the checks, the script and what it printed."""
    slug = Path(finding["script"]).stem.removeprefix(package.replace("-", "_") + "_").replace("_", " ")
    lines = [f"### {slug}", "", finding["sentence"], "", STATES[finding["reproduced"]] + finding["message"], ""]
    if finding["silent"]:
        lines += [
            "Its checks are all of cases that OCP MX v1.0 leaves open (`mx_silent`), where this suite has to choose.",
            "",
        ]
    least, most = finding["smallest"], finding["worst"]
    if least:
        lines += [f"- Smallest failing input: `{least['input']}`, in `{least['id']}` of `{least['adapter']}`"]
    if most:
        lines += [f"- Size: {size(most)}, in `{most['id']}` of `{most['adapter']}`"]
    if finding["checks"]:
        checks = [f"- {each}" for each in listed(finding["checks"])]
        lines += ["", *folded(f"The {len(finding['checks'])} failing checks that show it", checks)]
    else:
        lines += ["- **No failing check of this run shows it.**", ""]
    name = finding["script"]
    lines += [f"[{name}](../conformance/matrix/findings/{name}):", "", "```python", finding["source"], "```", ""]
    return [*lines, "```", finding["output"], "```", ""] if finding["output"] else lines


def folded(title: str, lines: list[str]) -> list[str]:
    """Lines behind a title that opens them."""
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def size(most: dict) -> str:
    """The error and its bound, as the check measured them."""
    ratio, worst = most["ratio"], most["worst"]
    if most["verdict"] != "fail" or (ratio is None and not worst):
        return f"{most['verdict']}: {most['message']}"
    if not worst:
        return most["message"]
    bound = "equality was wanted" if ratio in ("inf", None) else f"error {report.cell(ratio)} x its bound"
    return f"{report.show(worst['actual'])} for {report.show(worst['expected'])}; {bound}"


def listed(checks: list[dict]) -> list[str]:
    """Ids by adapter and question: ``name: stage.quantity.aspect[a], [b]``."""
    groups: dict[tuple, list] = {}
    for check in checks:
        question, _, place = check["id"].partition("[")
        groups.setdefault((check["adapter"], question), []).append(f"[{place}")
    return [f"`{short(adapter)}` `{question}` {', '.join(places)}" for (adapter, question), places in groups.items()]


def unexplained(row: dict) -> list[str]:
    """Failing checks that no script explains, one by one."""
    if not row["unexplained"]:
        return []
    failing = {
        (entry["adapter"], check["id"]): check for entry in row["adapters"] for check in entry.get("failing", ())
    }
    lines = ["### Unexplained", "", "These checks failed, and no script of this package explains them.", ""]
    for named in row["unexplained"]:
        check = failing[named["adapter"], named["id"]]
        lines.append(f"- `{named['adapter']}` `{check['id']}`: {check['verdict']}: {check['message']}")
    return [*lines, ""]


def markdown_table(head: list[str], body: list[list[str]]) -> str:
    escape = lambda text: text.replace("|", "\\|").replace("\n", " ")  # noqa: E731
    return "".join(f"| {' | '.join(map(escape, row))} |\n" for row in [head, ["---"] * len(head), *body])
