"""One check: it is run, and whatever it raises is its outcome."""

import pytest

from ..protocol.result import AdapterError, NotOffered, frames
from ..report.results import EMPTY, about, clean
from .state import Session


def run(session: Session, check) -> tuple[dict, str]:
    """The outcome of a check, with the known deviations applied, and traceback lines if it raised."""
    outcome, details = outcome_of(check, session.subject)
    if session.deviations:
        outcome = session.deviations.apply(check.id, outcome)
    return outcome, details


def outcome_of(check, subject) -> tuple[dict, str]:
    """The outcome of a check, and traceback lines if it raised."""
    try:
        return clean(check.run(subject), about(check)), ""
    except NotOffered as error:
        return ended("not offered", str(error)), ""
    except AdapterError as error:
        return ended(error.verdict, str(error)), error.details
    except (Exception, SystemExit, pytest.skip.Exception, pytest.fail.Exception) as error:
        return ended("error", f"{type(error).__name__} in the suite: {error}"), frames(error)


def ended(verdict: str, message: str) -> dict:
    """The outcome of a check that did not come to compare anything."""
    return EMPTY | {"verdict": verdict, "message": message, "extra": {}}


def properties(check, outcome: dict) -> list[tuple[str, str]]:
    """What --junit-xml shows of a check. Strings only: others may not survive the way from a worker."""
    values = {name: getattr(check, name) for name in ("kind", "stage", "quantity", "layout", "policy", "case")}
    values |= {name: outcome[name] for name in ("verdict", "ratio", "first_step")}
    return [(name, str(value)) for name, value in values.items() if value is not None]
