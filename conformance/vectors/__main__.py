"""``conform vectors``: write the test vectors, or judge what a program made of them."""

import sys
from pathlib import Path

from ..report import text as report
from ..report.files import as_json, write
from ..report.markdown import markdown
from ..report.repeat import repeat
from ..report.results import faults
from ..report.summary import summary
from . import check, export
from .strict import load_json
from .writing import DEFAULT

MALFORMED = 2


def add_commands(commands) -> None:
    """``export`` and ``check``, as subcommands of an argparse parser; ``run`` carries out what was parsed."""
    out = commands.add_parser("export", help="write the test vectors to a new directory")
    out.add_argument("directory", metavar="DIR")
    out.add_argument("--stage", metavar="LIST", help="only these stages; commas and globs")
    out.add_argument("--policy", metavar="LIST", help="storage formats, each a policy; default float32")
    out.add_argument(
        "--describe", metavar="FILE.json", help="formats, choices and layouts, as describe() would say them"
    )
    out.add_argument("--seed", type=int, default=0, metavar="N", help="other cases of the same kind")
    out.add_argument("--full", action="store_true", help="expected gradients of weight matrices in every case")
    judge = commands.add_parser("check", help="judge the files that a program wrote")
    judge.add_argument("directory", metavar="DIR")
    judge.add_argument("answers", metavar="RESULTS")
    judge.add_argument("--stage", metavar="LIST", help="only these stages; commas and globs")
    judge.add_argument("--check", action="append", metavar="ID", help="only this check")
    judge.add_argument("--report", metavar="FILE.md", help="write the report there")
    judge.add_argument("--results", metavar="FILE.json", help="write the results there")


def run(options) -> int:
    """0: no fault found; 1: a verdict against the results, or none; 2: files or options that cannot be used."""
    try:
        return _export(options) if options.command == "export" else _check(options)
    except (ValueError, OSError) as error:
        print(f"conform: {error}", file=sys.stderr)
        return MALFORMED


def _export(options) -> int:
    description = dict(DEFAULT)
    if options.describe:
        description = load_json(Path(options.describe).read_bytes(), options.describe)
    if options.policy:
        description["policies"] = {name: {"storage": name} for name in names(options.policy)}
        description.pop("formats", None)
    stages = names(options.stage) if options.stage else None
    made = export(options.directory, description=description, stages=stages, seed=options.seed, full=options.full)
    size = sum(file["bytes"] for file in made["files"]) / 1e6
    print(f"{len(made['vectors'])} vectors in {len(made['files'])} files, {size:.1f} MB, in {options.directory}")
    return 0


def _check(options) -> int:
    stages = names(options.stage) if options.stage else None
    found = check(options.directory, options.answers, stages=stages, ids=options.check)
    for path, render in ((options.results, as_json), (options.report, markdown)):
        if path:
            write(path, render(found))
    shown = faults(found) if options.check else []
    for entry in shown:
        print(report.failure(entry, repeat(entry, found)))
    print("\n".join([*summary(found), report.closing(found)]))
    return 0 if found["verdict"] == "no fault found" else 1


def names(option: str) -> list[str]:
    return [name.strip() for name in option.split(",") if name.strip()]


def main(arguments=None) -> int:
    from ..cli import Parser

    about = "Test vectors for programs in any language. Exit code 0: no fault found. 1: a fault, or no verdict. "
    parser = Parser(prog="conform vectors", description=f"{about}2: files or options that cannot be used.")
    add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser))
    try:
        options = parser.parse_args(arguments)
    except ValueError as error:
        print(f"conform: {error}", file=sys.stderr)
        return MALFORMED
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
