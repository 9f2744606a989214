"""The end of a run: the adapter is let go, the workers' parts are put together, results are made of them."""

from ..protocol.environment import environment
from ..protocol.result import AdapterError, NotOffered
from ..report import changes, results
from .state import Session


def close(session: Session) -> None:
    """Let the adapter go. What goes wrong in that is a problem of the run."""
    if session.subject is None:
        return
    try:
        session.subject.close()
    except (AdapterError, NotOffered) as error:
        session.problems.append(str(error))
    session.problems += session.subject.problems
    session.notes += session.subject.notes


def share(session: Session) -> dict:
    """What a worker has to say, in JSON's types. Without a plan where none was made."""
    shared = {"collected": session.collected, "usage_error": session.usage_error}
    shared |= {"problems": session.problems, "notes": session.notes}
    if session.plan is not None:
        shared |= {
            "plan": [results.about(check) for check in session.plan],
            "subject": session.subject.about(),
            "environment": environment(session.subject),
            "isolation": session.limits().to_dict(),
        }
    return shared


def merge(session: Session, shared: dict) -> None:
    """Take in what a worker shared."""
    session.collected |= shared.get("collected", False)
    session.usage_error = session.usage_error or shared.get("usage_error", "")
    session.problems += shared.get("problems", [])
    session.notes += shared.get("notes", [])
    torch = session.shared.get("environment", {}).get("torch")
    session.shared |= shared
    if torch and session.shared.get("environment"):  # one worker may have had no check that imports it
        session.shared["environment"]["torch"] = torch


def conclude(session: Session) -> bool:
    """Make the results. False where there is no plan: collection failed, or no worker lived to share one."""
    shared = share(session) if session.plan is not None else session.shared
    if "plan" not in shared:
        return False
    selection = {name: session.options[name] for name in ("stage", "policy")}
    selection |= {"pyargs": session.pyargs, "started_by": session.started_by}
    session.results = results.build(
        plan=shared["plan"], outcomes=session.outcomes, selected=set(session.selected.values()),
        subject=shared["subject"], adapter=session.adapter, seed=session.seed, env=shared["environment"],
        selection=selection, problems=sorted(set(session.problems)), notes=sorted(set(session.notes)),
        isolation=shared["isolation"], deviations=session.deviations,
    )  # fmt: skip
    if session.earlier is not None:
        session.changes = changes.changes(session.earlier, session.results)
    return True


def conforms(session: Session) -> bool:
    """Whether the run may end in exit code 0."""
    return session.results["verdict"] == "no fault found" and not session.results["counts"]["lost"]
