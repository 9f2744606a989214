"""The keys of ``describe()``: one table for the check of a description, the README and new adapters."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .losses import declared
from .pattern import Pattern

LAYOUTS = ("mtp", "eagle3")
#: Cases of MX blocks in which OCP MX v1.0 leaves the result open.
SILENT = ("zero_block", "nonfinite", "clamp", "subnormal")
SAMPLED_FROM = ("laws", "logits")
REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """One key: the Python type of its value in words, what holds where it is left out, and what it says.

    ``check(value, where)`` raises ValueError for a value that cannot be used; ``where`` is how a message names it.
    """

    name: str
    type: str
    default: Any
    meaning: str
    check: Callable[[Any, str], Any]

    @property
    def default_in_words(self) -> str:
        if self.default is REQUIRED:
            return "needed"
        if isinstance(self.default, tuple | list):
            return ", ".join(f"`{item}`" for item in self.default) or "none"
        return "none" if self.default in (None, "", {}) else f"`{self.default}`"

    def of(self, description: Mapping[str, Any]) -> Any:
        """Its value there, checked; the default where it is left out."""
        if self.name not in description and self.default is not REQUIRED:
            return self.default
        value = description.get(self.name)
        self.check(value, f"describe()[{self.name!r}]")
        return value


def instance(kind: type, wanted: str) -> Callable[[Any, str], None]:
    """A check that a value is of a type."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, kind):
            raise ValueError(f"{where} is {value!r}; wanted {wanted}")

    return check


def some_of(allowed: tuple[str, ...]) -> Callable[[Any, str], None]:
    """A check for a list of names, each once."""

    def check(value: Any, where: str) -> None:
        instance(list | tuple, "a list")(value, where)
        if not all(item in allowed for item in value) or len(set(value)) != len(value):
            raise ValueError(f"{where} is {list(value)!r}; wanted some of {', '.join(allowed)}, each once")

    return check


def one_of(allowed: tuple[str, ...]) -> Callable[[Any, str], None]:
    def check(value: Any, where: str) -> None:
        if value not in allowed:
            raise ValueError(f"{where} is {value!r}; wanted one of {', '.join(allowed)}")

    return check


text, switch = instance(str, "a string"), instance(bool, "True or False")
mapping = instance(Mapping, "a mapping")

KEYS = (
    Key("name", "str", REQUIRED, "of the implementation, for the report", text),
    Key("version", "str", "", "for the report", text),
    Key("url", "str", "", "for the report", text),
    Key("formats", "dict", None, "`storage`, and where they differ from what follows from it `accumulate`, `router`, "
        "`logits`, `attention_output`; needed unless `policies` is there", mapping),
    Key("policies", "dict", {}, "several such formats, by name; `start(config, choices, formats)` is told which one is "
        "on", instance(Mapping, "a mapping from names to formats")),
    Key("choices", "dict", {}, "where the published reading that is implemented differs from the default "
        "(`reference/config.py` lists all)", mapping),
    Key("layouts", "list", LAYOUTS, "of the slots", instance(list | tuple, "a list")),
    Key("documents", "bool", True, "whether packed documents are taken", switch),
    Key("quantized", "bool", True, "whether the expert products run with MX fake quantisation", switch),
    Key("mx_silent", "list", (), "which of `zero_block` `nonfinite` `clamp` `subnormal` are handled otherwise, where "
        "OCP MX v1.0 is silent and this suite has to choose", some_of(SILENT)),
    Key("sampled_from", "str", "laws", "`logits` if `speculative_sample` hands its sampler logarithms of the laws: "
        "their rounding is then allowed", one_of(SAMPLED_FROM)),
    Key("losses", "dict", {}, "which losses other than LK are offered, and how each is reduced: "
        "docs/losses.md", lambda value, where: declared(value)),
    Key("pattern", "dict", None, "loss, step weights and reduction of an EAGLE-3 trainer with any draft layer, which "
        "is then judged from outside: docs/pattern.md", lambda value, where: Pattern.of(value)),
)  # fmt: skip
BY_NAME = {key.name: key for key in KEYS}


def refuse_unknown(names: Iterable[Any]) -> None:
    """Raises ValueError for a name that is no key, with the key that was probably meant."""
    for name in names:
        if name not in BY_NAME:
            meant = meant_by(name)
            hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(BY_NAME)}"
            raise ValueError(f"describe() has an unknown key {name!r}; {hint}")


def meant_by(name: Any) -> str | None:
    """The key that a misspelt one resembles; None if none does."""
    close = get_close_matches(str(name).lower().removesuffix("_declared"), BY_NAME, n=1, cutoff=0.75)
    return close[0] if close else None


def table() -> str:
    """The keys as a table in Markdown."""
    linked = {key.name: re.sub(r"docs/\w+\.md", r"[\g<0>](\g<0>)", key.meaning) for key in KEYS}
    rows = [f"| `{key.name}` | {key.type} | {key.default_in_words} | {linked[key.name]} |" for key in KEYS]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])
