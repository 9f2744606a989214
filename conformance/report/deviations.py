"""Known deviations: faults that are expected, each with a reason, a link and an end date (``--deviations FILE.toml``).

An entry excuses exactly what it describes. A check that it names and that fails as described ends as "known deviation",
never as passed. Everything else about an entry that does not hold is a fault of the run: no such check, expired, or
stale, which means that the check passes, ends in another verdict, or that its ratio left the range on either side.
"""

import datetime
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

VERDICT = "known deviation"
KINDS = ("fail", "error", "crash", "timeout")
REQUIRED = ("id", "kind", "reason", "url", "until")
UNMEASURED = "none"  # of a failure that has no ratio, such as a missing gradient
NOT_JUDGED = ("deselected", "lost")  # lost is a fault already


@dataclass(frozen=True)
class Deviation:
    """One entry. ``ratio`` is (low, high), both included, or None for what has no ratio."""

    number: int
    id: str
    kind: str
    ratio: tuple | None
    reason: str
    url: str
    until: datetime.date

    def names(self, check_id: str) -> bool:
        """``*`` and ``?`` are wild; a bracket stands for itself, as ids end in one."""
        wild = re.escape(self.id).replace(r"\*", ".*").replace(r"\?", ".")
        return re.fullmatch(wild, check_id) is not None

    def misfit(self, outcome: dict) -> str:
        """Why this outcome is not what the entry describes; empty if it is."""
        verdict, ratio = outcome["verdict"], _number(outcome["ratio"])
        if verdict != self.kind:
            return "the check passes" if verdict == "pass" else f"the check ends as {verdict!r}, not as {self.kind!r}"
        if self.kind != "fail":
            return ""
        if self.ratio is None:
            return "" if ratio is None else f"its ratio is {ratio:.4g}, and the entry says that it has none"
        low, high = self.ratio
        if ratio is None:
            return f"the failure has no ratio; the entry says {low:g} to {high:g}"
        return "" if low <= ratio <= high else f"its ratio {ratio:.4g} is outside {low:g} to {high:g}"

    def expired(self, today: datetime.date) -> bool:
        return self.until < today

    def excuse(self, outcome: dict) -> dict:
        """The outcome as a known deviation."""
        said = {"number": self.number, "id": self.id, "kind": self.kind, "reason": self.reason, "url": self.url}
        ratio = None if self.ratio is None else [f"{end:g}" for end in self.ratio]
        said |= {"ratio": ratio, "until": self.until.isoformat()}
        return outcome | {"verdict": VERDICT, "extra": outcome["extra"] | {"deviation": said}}

    def __str__(self) -> str:
        return f"deviation {self.number} ({self.id})"


@dataclass(frozen=True)
class Deviations:
    """All entries of a file, on one day."""

    entries: tuple = ()
    today: datetime.date = datetime.date.min

    def apply(self, check_id: str, outcome: dict) -> dict:
        """The outcome, or the same as a known deviation if one entry, and only one, describes it."""
        named = [entry for entry in self.entries if entry.names(check_id)]
        if len(named) != 1 or named[0].expired(self.today) or named[0].misfit(outcome):
            return outcome
        return named[0].excuse(outcome)

    def unmatched(self, check_ids: Iterable[str]) -> list[str]:
        """A sentence for each entry that names no check. ``check_ids`` is the whole plan, not a part of it."""
        known = list(check_ids)
        return [
            f"{entry} is unmatched: the adapter's plan has no check of that id"
            for entry in self.entries
            if not any(entry.names(check_id) for check_id in known)
        ]

    def faults(self, checks: list[dict]) -> list[str]:
        """A sentence for each entry that is expired, stale, or in another's way. ``checks`` as in the results."""
        found = [f"{entry} expired: until {entry.until}" for entry in self.entries if entry.expired(self.today)]
        for check in checks:
            named = [entry for entry in self.entries if entry.names(check["id"])]
            if len(named) > 1:
                found.append(f"{named[0]} and {named[1]} both name {check['id']}; one check, one entry")
            elif named and check["verdict"] not in (VERDICT, *NOT_JUDGED):
                why = named[0].misfit(check)
                found += [f"{named[0]} is stale: {check['id']}: {why}"] if why else []
        return found


def load(path) -> Deviations:
    """Read a file. Raises ValueError with a sentence naming entry and key."""
    try:
        told = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not TOML: {error}") from error
    unknown = sorted(set(told) - {"deviation"})
    if unknown:
        raise ValueError(f"has a key {unknown[0]!r}; wanted entries [[deviation]] only")
    entries = told.get("deviation", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("has 'deviation' that is no list of tables; write [[deviation]] above each entry")
    return Deviations(tuple(_entry(n, entry) for n, entry in enumerate(entries, 1)), datetime.date.today())


def _entry(number: int, told: dict) -> Deviation:
    where = f"deviation {number}" + (f" ({told['id']})" if isinstance(told.get("id"), str) else "")
    unknown = sorted(set(told) - {*REQUIRED, "ratio"})
    if unknown:
        raise ValueError(f"{where} has an unknown key {unknown[0]!r}; known: {', '.join((*REQUIRED, 'ratio'))}")
    for key in REQUIRED:
        if key not in told:
            raise ValueError(f"{where} has no key {key!r}")
    for key in ("id", "kind", "reason", "url"):
        if not isinstance(told[key], str) or not told[key].strip():
            raise ValueError(f"{where} has {key} = {told[key]!r}; wanted a string that says something")
    if told["kind"] not in KINDS:
        raise ValueError(f"{where} has kind = {told['kind']!r}; wanted one of {', '.join(KINDS)}")
    fields = {key: told[key] for key in ("id", "kind", "reason", "url")}
    return Deviation(number, ratio=_ratio(told, where), until=_date(told["until"], where), **fields)


def _ratio(told: dict, where: str) -> tuple | None:
    if told["kind"] != "fail":
        if "ratio" in told:
            raise ValueError(f"{where} has a key 'ratio', but kind {told['kind']!r} measures none")
        return None
    if "ratio" not in told:
        raise ValueError(f"{where} has no key 'ratio'; wanted [low, high], or {UNMEASURED!r} where none is measured")
    ratio = told["ratio"]
    if ratio == UNMEASURED:
        return None
    numbers = isinstance(ratio, list) and len(ratio) == 2 and all(type(x) in (int, float) for x in ratio)
    if not numbers or not 0 < ratio[0] <= ratio[1]:
        raise ValueError(f"{where} has ratio = {ratio!r}; wanted [low, high] with 0 < low <= high, or {UNMEASURED!r}")
    return tuple(map(float, ratio))


def _date(value, where: str) -> datetime.date:
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    try:
        return datetime.date.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where} has until = {value!r}; wanted a date such as 2027-01-31") from None


def _number(ratio) -> float | None:
    """A ratio as the results hold it: a number, a string for one that is not finite, or None. NaN is beyond any."""
    if ratio is None:
        return None
    value = float(ratio)
    return math.inf if math.isnan(value) else value
