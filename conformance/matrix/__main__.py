"""conform matrix [PACKAGE ...]: build the environments, run the packages, write reports/MATRIX.md and its data."""

import argparse
import sys
from pathlib import Path

from . import page
from .environments import Builder
from .packages import PACKAGES
from .running import Runner, settled

ROOT = Path(__file__).resolve().parents[2]
PAGE, DATA = "reports/MATRIX.md", "reports/data/matrix.json"
MISTAKE = 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="conform matrix", allow_abbrev=False,
        description="Builds an environment for each package, runs the suite on its adapters there, reproduces its "
        "findings, and writes the rows of these packages. Exit code 0: all ran, and every failing check is explained "
        "by a script that reproduces it. 1: not so; the page says where. 2: a mistake in the command.",
    )  # fmt: skip
    made.add_argument("packages", nargs="*", metavar="PACKAGE", help="only these; the rows of the others stay")
    made.add_argument("--only", metavar="LIST", help="only these stages; commas and globs. Needs --out and --json")
    made.add_argument("--out", metavar="FILE.md", help=f"default {PAGE}")
    made.add_argument("--json", metavar="FILE.json", help=f"default {DATA}")
    made.add_argument("--environments", metavar="DIR", default=".venvs", help="default .venvs")
    made.add_argument("--rebuild", action="store_true", help="make the packages' environments anew")
    made.add_argument("--workers", type=int, default=0, metavar="N", help="of pytest, for each adapter")
    made.add_argument("--list", action="store_true", help="name the packages and their adapters; run nothing")
    made.error = mistake
    return made


def mistake(message: str):
    raise ValueError(f"{message} (conform matrix --help lists what there is)")


def main(arguments: list[str] | None = None, packages=PACKAGES, **runner) -> int:
    """``runner`` replaces fields of the Runner. Raises ValueError with a sentence for a mistake in the command."""
    options = parser().parse_args(arguments)
    chosen = choose(options.packages, packages)
    if options.list:
        print("\n".join(f"{package.name}: {', '.join(package.adapters)}" for package in chosen))
        return 0
    if options.only and not (options.out and options.json):
        raise ValueError("--only gives a part of each row; name other files for it with --out and --json")
    if options.workers < 0:
        raise ValueError(f"--workers {options.workers}: wanted a number of processes, or 0 for none")
    files = Path(options.json or DATA).absolute(), Path(options.out or PAGE).absolute()
    page.read(files[0])  # before anything is built
    return run(chosen, files, make_runner(options, packages, runner), packages)


def choose(names: list[str], packages) -> list:
    known = {package.name: package for package in packages}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no package {name!r} in the matrix; known: {', '.join(known)}")
    return [package for package in packages if not names or package.name in names]


def make_runner(options, packages, fields: dict) -> Runner:
    requirements = ROOT / "requirements" / "matrix"
    if "builder" not in fields and not requirements.is_dir():
        raise ValueError("the matrix is run from a checkout, which has the packages' pins; this is an installed suite")
    builder = Builder(Path(options.environments).absolute(), requirements, options.rebuild)
    ours = {"root": ROOT, "builder": builder, "out": ROOT / "build" / "matrix", "packages": packages}
    return Runner(**ours | fields, stage=options.only, workers=options.workers)


def run(chosen: list, files: tuple, runner: Runner, packages) -> int:
    """Each package in turn; its row is on disk before the next one begins."""
    good = True
    for package in chosen:
        print(f"{package.name} ...", flush=True)
        row = runner.row(package)
        page.update(row, *files, packages)
        print("\n".join(lines(row)), flush=True)
        good &= settled(row)
    print(f"written: {files[1]}, {files[0]}")
    return 0 if good else 1


def lines(row: dict) -> list[str]:
    """What became of a package, for the terminal."""
    parts = [f"  not run: {row['message']}"] if row["message"] else []
    for entry in row["adapters"]:
        name = page.short(entry["adapter"])
        ran = [f"{stage} {page.cell(counts).replace('*', '')}" for stage, counts in entry.get("stages", {}).items()
               if page.cell(counts) != "-"]  # fmt: skip
        parts.append(f"  {name}: {'not run: ' + entry['message'] if entry['message'] else ', '.join(ran) or 'nothing'}")
    for finding in row["findings"]:
        state = {True: "reproduced", False: "NOT reproduced", None: "no answer"}[finding["reproduced"]]
        parts.append(f"  {finding['script']}: {state}; {len(finding['checks'])} checks")
    return parts + [f"  unexplained: {each.replace('`', '')}" for each in page.listed(row["unexplained"])]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"conform matrix: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
