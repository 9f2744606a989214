"""The options of a run: one table for the command line, the ini file and the documentation. Imports nothing heavy.

The ini name of ``--call-timeout`` is ``draftconf_call_timeout``, and so on. The command line wins over the ini file.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """``type`` is str, int, float or bool; a bool is a switch. ``negative`` turns it off again."""

    flag: str
    help: str
    metavar: str | None = None
    type: type = str
    default: object = None
    dest: str = ""
    negative: str = ""

    @property
    def name(self) -> str:
        return "draftconf_" + (self.dest or self.flag.removeprefix("--"))

    @property
    def ini(self) -> str:
        return "draftconf_" + self.flag.removeprefix("--").replace("-", "_")


#: Set by ``conform run``: the command whose words mistakes and repeats are told in.
STARTED_BY = "DRAFTCONF_STARTED_BY"

OPTIONS = (
    Option("--adapter", "implementation under test: built-in name, package.module:attribute, or "
           "path/to/file.py:attribute", "NAME", default="fast"),
    Option("--stage", "only these stages; commas, globs such as mla_*", "LIST"),
    Option("--policy", "only these of the adapter's policies; commas", "LIST"),
    Option("--deviations", "faults that are known, until a date", "FILE.toml"),
    Option("--seed", "other cases of the same kind", "N", int, 0),
    Option("--results", "write the results there", "FILE.json"),
    Option("--report", "write the report there", "FILE.md"),
    Option("--html", "write the report there as one self-contained page", "FILE.html"),
    Option("--badge", "write a badge there, as shields.io endpoints are", "FILE.json"),
    Option("--summary", "append a summary to the file that $GITHUB_STEP_SUMMARY names", type=bool),
    Option("--compare", "say what changed since the run that left these results", "OLD.json"),
    Option("--dump", "save the arrays of failing checks there, as .npz", "DIR"),
    Option("--isolate", "run the adapter in a process of its own; the default for all but fast and reference",
           type=bool, negative="--no-isolate"),
    Option("--adapter-python", "interpreter or virtual environment of that process; default this one", "PATH",
           dest="python"),
    Option("--call-timeout", "that one call may take in that process; default 120", "SECONDS", float, dest="timeout"),
    Option("--memory", "that the process may hold; default 12, 0 for no limit", "GIB", float),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}
INI_TYPES = {str: "string", int: "int", float: "float", bool: "bool"}


def add(parser) -> None:
    """Every option, and its ini value."""
    group = parser.getgroup("draftconf", "conformance of a draft step")
    for option in OPTIONS:
        if option.type is bool:
            group.addoption(option.flag, action="store_true", default=None, dest=option.name, help=option.help)
        else:
            given = {"type": option.type, "metavar": option.metavar, "default": None}
            text = option.help + ("" if option.default is None else f"; default {option.default}")
            group.addoption(option.flag, dest=option.name, help=text, **given)
        if option.negative:
            text = f"the opposite of {option.flag}"
            group.addoption(option.negative, action="store_false", default=None, dest=option.name, help=text)
        parser.addini(option.ini, f"{option.flag}: {option.help}", type=INI_TYPES[option.type], default=None)


def value(config, name: str):
    """Of the command line, else of the ini file, else the default. ``name`` without its prefix."""
    option = BY_NAME[f"draftconf_{name}"]
    given = config.getoption(option.name)
    if given is None:
        given = config.getini(option.ini)
    return option.default if given is None or given == "" else given


def values(config) -> dict:
    """Every option's value by name without its prefix."""
    return {name.removeprefix("draftconf_"): value(config, name.removeprefix("draftconf_")) for name in BY_NAME}
