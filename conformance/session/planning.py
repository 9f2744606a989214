"""From the options to the plan: the adapter is loaded, and its description says which checks there are."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ..checks import plan as checks
from ..protocol.isolation import IsolatedSubject
from ..protocol.loading import load
from ..protocol.subject import Subject
from .state import Session


def make_plan(session: Session) -> list:
    """The checks of the run, in data order. Raises ValueError for a wrong adapter, policy or stage."""
    session.subject = subject = open_subject(session)  # from here on it is closed at the end
    policies = names(session.options["policy"])
    offered = subject.description.policies
    for policy in policies or ():
        if policy not in offered:
            raise ValueError(f"--policy {policy}: the adapter {session.adapter} offers {', '.join(offered)}")
    plan = list(checks.plan(subject.description, policies=policies, seed=session.seed))
    if session.deviations:
        whole = checks.plan(subject.description, seed=session.seed) if policies else plan
        session.problems += session.deviations.unmatched(check.id for check in whole)
    return narrow(plan, names(session.options["stage"]))


def open_subject(session: Session) -> Subject | IsolatedSubject:
    """The adapter, loaded where the options want it."""
    dump = session.folder / session.options["dump"] if session.options["dump"] else None
    limits = session.limits()
    if limits.isolated:
        return IsolatedSubject(session.adapter, limits, dump=dump)
    return Subject(load(session.adapter), dump=dump)


def names(option: str | None) -> list[str] | None:
    """The parts between commas; None if there are none."""
    return [name.strip() for name in (option or "").split(",") if name.strip()] or None


def narrow(plan: list, patterns: Iterable[str] | None) -> list:
    """The checks of the stages that fit a glob. Raises ValueError for one that fits none."""
    if patterns is None:
        return plan
    for pattern in patterns:
        if not any(fnmatchcase(check.stage, pattern) for check in plan):
            stages = dict.fromkeys(check.stage for check in plan)
            raise ValueError(f"--stage {pattern} is none of the stages planned for this adapter: {', '.join(stages)}")
    return [check for check in plan if any(fnmatchcase(check.stage, pattern) for pattern in patterns)]
