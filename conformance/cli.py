"""The ``conform`` command. Mistakes are told in one sentence, with exit code 2."""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from draftconf import __version__

from .options import OPTIONS, STARTED_BY

MISTAKE = 2
PYTEST_USAGE = 4
DESCRIPTION = "Is my draft trainer right? Conformance of an implementation with the K3 draft step."


class Parser(argparse.ArgumentParser):
    """One sentence in place of the usage."""

    def error(self, message: str):
        raise ValueError(f"{message[0].lower()}{message[1:]} ({self.prog} --help lists what there is)")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return dispatch(arguments)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        print(f"conform: {' '.join(said.split())}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        return 130


def dispatch(arguments: list[str]) -> int:
    parser = build()
    if arguments[:1] == ["run"]:
        return run(arguments[1:])
    for module in PASSED_ON:
        if arguments[:1] == [module] and available(module):
            return passed_on(module, arguments[1:])
    options = parser.parse_args(arguments)
    return options.do(options)


def build() -> Parser:
    parser = Parser(prog="conform", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"conform {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    commands.add_parser("run", help="the verdict on an implementation", add_help=False)
    one = commands.add_parser("stages", help="what each stage is: equation, source, inputs, outputs")
    one.add_argument("names", nargs="*", metavar="STAGE", help="only these, in full")
    one.set_defaults(do=stages)
    one = commands.add_parser("explain", help="what a check hunts, how its bound is derived, how to repeat it")
    one.add_argument("check", metavar="CHECK_ID", help="as a report prints it")
    one.add_argument("--adapter", default="fast", metavar="NAME", help="for the command that repeats it")
    one.add_argument("--seed", type=int, default=0, metavar="N")
    one.set_defaults(do=explain)
    one = commands.add_parser("new-adapter", help="write a commented adapter that runs at once")
    one.add_argument("path", metavar="PATH.py")
    one.add_argument("--plain", action="store_true", help="without PyTorch: NumPy arrays in and out")
    one.add_argument("--force", action="store_true", help="overwrite the file")
    one.set_defaults(do=new_adapter)
    one = commands.add_parser("report", help="render the results of an earlier run again")
    one.add_argument("results", metavar="RESULTS.json")
    for option in OPTIONS:
        if option.flag in ("--report", "--html", "--badge", "--compare"):
            one.add_argument(option.flag, metavar=option.metavar, help=option.help)
    one.set_defaults(do=report)
    for module, about in PASSED_ON.items():
        if available(module):
            commands.add_parser(module, help=about, add_help=False)
    return parser


# -- run ---------------------------------------------------------------------------------------------------------------


def run_parser() -> Parser:
    parser = Parser(
        prog="conform run", usage="conform run [ADAPTER] [options] [pytest's options]", allow_abbrev=False,
        description="Runs the suite with pytest; what is not listed here is handed to it, such as -n 2, -x or -q. "
        "Exit code 0: no fault found. 1: a fault, or no verdict. 2: a mistake in the command.",
    )  # fmt: skip
    parser.add_argument("--check", action="append", metavar="CHECK_ID", help="only this check")
    for option in OPTIONS:
        if option.type is bool:
            parser.add_argument(option.flag, action="store_true", help=option.help)
            if option.negative:
                parser.add_argument(option.negative, action="store_true", help=f"the opposite of {option.flag}")
        else:
            parser.add_argument(option.flag, metavar=option.metavar, help=option.help)
    return parser


def run(arguments: list[str]) -> int:
    """pytest in a process of its own: it must be the first to import what it rewrites."""
    named = arguments[:1] if arguments and not arguments[0].startswith("-") else []
    options, others = run_parser().parse_known_args(arguments[len(named) :])
    command = [sys.executable, "-m", "pytest", *targets(options.check or []), *others]
    for option in OPTIONS:
        for flag in filter(None, (option.flag, option.negative)):
            given = getattr(options, flag.removeprefix("--").replace("-", "_"))
            command += [flag] * (given is True) if option.type is bool else [] if given is None else [flag, given]
    if named:
        command += ["--adapter", named[0]]
    code = subprocess.call(command, env={"OMP_NUM_THREADS": "1", **os.environ, STARTED_BY: "conform"})
    return MISTAKE if code == PYTEST_USAGE else code


def targets(checks: list[str]) -> list[str]:
    """What pytest collects: the files of this checkout by path where we stand in it, else the installed package."""
    from .catalogue.explain import ID
    from .report.repeat import KINDS, module_of

    here = Path("conformance").resolve() == Path(__file__).resolve().parent
    start = [] if here else ["-p", "draftconf.conformance.plugin", "--pyargs"]
    if not checks:
        return [*start, "conformance/" if here else "draftconf.conformance"]
    for check in checks:
        if not ID.fullmatch(check):
            raise ValueError(f"{check!r} is no check id: wanted stage.quantity.aspect[layout-policy-case]")
        kind = {"trace": "trace", "end": "end_to_end"}.get(ID.fullmatch(check)["aspect"], "stage")
        test = KINDS[kind] if here else module_of(KINDS[kind])
        start.append(f"{test}[{check}]")
    return start


# -- the others --------------------------------------------------------------------------------------------------------


def stages(options) -> int:
    from .catalogue.descriptions import boundaries, find, methods

    for name in options.names:
        found = find(name)
        if not found:
            known = dict.fromkeys(each.name for each in (*methods(), *boundaries()))
            raise ValueError(f"there is no stage {name}; known: {', '.join(known)}")
        print("\n\n".join(map(in_full, found)))
    if not options.names:
        print("Methods an adapter may offer (conform stages NAME tells more)\n")
        print(columns([(s.name, s.equation, s.source) for s in methods()]))
        print("\nBoundaries of the trace, in data order\n")
        print(columns([(s.name, s.equation, s.source) for s in boundaries()]))
    return 0


def columns(rows: list[tuple]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def in_full(stage) -> str:
    what = "method" if stage.kind == "method" else "boundary of the trace"
    rows = [(f"{stage.name}", f"{what}, layout {' and '.join(stage.layouts)}"), ("equation", stage.equation)]
    rows += [("source", stage.source), ("inputs", ", ".join(stage.inputs)), ("outputs", ", ".join(stage.outputs))]
    if stage.decisions:
        rows.append(("decisions", ", ".join(stage.decisions)))
    if stage.parameters:
        rows.append(("parameters", ", ".join(f"{prefix}*" for prefix in stage.parameters)))
    return columns(rows)


def explain(options) -> int:
    from .catalogue.explain import explain as told

    for line in told(options.check, options.adapter, options.seed).splitlines():
        indent = " " * (10 if line[:1].isupper() and line[:10].rstrip().isalpha() else 4)
        print(textwrap.fill(line, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
              if line.strip() and not line.startswith("Repeat") else line)  # fmt: skip
    return 0


def new_adapter(options) -> int:
    from .catalogue.skeletons import skeleton

    path = Path(options.path)
    if path.suffix != ".py":
        raise ValueError(f"{path} is no Python file: wanted a name that ends in .py")
    if path.exists() and not options.force:
        raise ValueError(f"{path} exists; --force overwrites it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(skeleton(options.path, options.plain), encoding="utf-8")
    print(f"written: {path}\nrun it:  conform run {shlex.quote(options.path)}:adapter --stage lk_loss")
    return 0


def report(options) -> int:
    from .report import changes
    from .report.files import as_json, write
    from .report.html.page import html
    from .report.markdown import markdown
    from .report.summary import badge, summary
    from .report.text import closing

    results = changes.read(options.results)
    found = changes.changes(changes.read(options.compare), results) if options.compare else None
    files = {
        options.report: lambda: markdown(results, found),
        options.html: lambda: html(results, found),
        options.badge: lambda: as_json(badge(results)),
    }
    for path, render in files.items():
        if path:
            write(path, render())
            print(f"written: {path}")
    print("\n".join([*summary(results, found), closing(results)]))
    return 0


#: Commands of modules with a command line of their own.
PASSED_ON = {
    "vectors": "test vectors for programs in any language: export them, check what a program wrote",
    "matrix": "every public package under test, stage by stage",
}


def available(module: str) -> bool:
    return importlib.util.find_spec(f"draftconf.conformance.{module}") is not None


def passed_on(module: str, arguments: list[str]) -> int:
    """The module's own ``main``."""
    name = f"draftconf.conformance.{module}"
    if importlib.util.find_spec(name).submodule_search_locations:
        name += ".__main__"
    return importlib.import_module(name).main(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
