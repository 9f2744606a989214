"""The pytest plugin: options, one item per check, the guards against a run that looks green and is not, the verdict.

Import-light on purpose: every pytest run in an environment where the suite is installed loads it, so NumPy, the oracle
and the adapter are imported only once a file of ``conformance/`` has been collected. Outcomes travel in
``report.user_properties`` as a JSON string, since that alone reaches the controller of pytest-xdist unharmed.
"""

import json
import os
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from . import options
from .report.progress import Terminal

RECORDER = "draftconf-recorder"
PROPERTY = "draftconf"
KIND_OF = {"test_stage": "stage", "test_trace": "trace", "test_end_to_end": "end_to_end"}
MODULES = ("test_stages", "test_trace", "test_end_to_end")  # beside this file
FAULTS = ("fail", "error", "crash", "timeout")
NODE = re.compile(r"::(?:test_stage|test_trace|test_end_to_end)\[(.+\[.+\])\]")


def pytest_addoption(parser):
    options.add(parser)


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been set up
def pytest_configure(config):
    try:
        recorder = Recorder(config, _deviations(config), _earlier(config))
        if started_by() == "conform" and not recorder.is_worker:
            recorder.plan_early()
    except pytest.UsageError as error:
        if started_by() != "conform":
            raise
        print(f"conform: {' '.join(str(error).split())}", file=sys.stderr)
        raise pytest.UsageError from error
    config.pluginmanager.register(recorder, RECORDER)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not recorder.is_worker:
        config.pluginmanager.register(Terminal(reporter, recorder), f"{RECORDER}-terminal")


def started_by() -> str:
    """The command that was run: ``pytest``, or ``conform`` around it."""
    return os.environ.get(options.STARTED_BY, "pytest")


def _earlier(config):
    """The results to compare with, or None. Read before anything runs, as the deviations are."""
    path = options.value(config, "compare")
    if not path or hasattr(config, "workerinput"):
        return None
    from .report import changes

    try:
        return changes.read(config.invocation_params.dir / path)
    except ValueError as error:
        raise pytest.UsageError(f"--compare {path}: {error}") from error


def _deviations(config):
    """The entries of the file, or None. Read before anything runs, so that a mistake in it costs nothing."""
    path = options.value(config, "deviations")
    if not path:
        return None
    from .report import deviations

    try:
        return deviations.load(config.invocation_params.dir / path)
    except ValueError as error:
        raise pytest.UsageError(f"--deviations {path} {error}") from error


def judge(check, request):
    """Run one check and make its outcome that of the test item."""
    __tracebackhide__ = True
    from .report.repeat import repeat_command
    from .report.text import failure

    recorder = request.config.pluginmanager.get_plugin(RECORDER)
    outcome, details = recorder.run(check)
    if recorder.deviations:
        outcome = recorder.deviations.apply(check.id, outcome)
    request.node.user_properties += [(PROPERTY, json.dumps(outcome, allow_nan=False)), *_properties(check, outcome)]
    if outcome["verdict"] in FAULTS:
        entry = recorder.about(check) | outcome
        pyargs, options = request.config.option.pyargs, recorder.limits().options
        command = repeat_command(entry, recorder.adapter, recorder.seed, pyargs, options, started_by())
        pytest.fail(failure(entry, command, details), pytrace=False)
    if outcome["verdict"] == "not offered":
        pytest.skip(outcome["message"] or "not offered")
    if outcome["verdict"] == "known deviation":
        pytest.xfail(outcome["extra"]["deviation"]["reason"])


def _of_the_suite_module(module) -> bool:
    """Whatever name it was imported by: a checkout's goes by its folder."""
    file = Path(module.__file__)
    return file.stem in MODULES and file.parent.resolve() == Path(__file__).resolve().parent


def _properties(check, outcome: dict) -> list[tuple[str, str]]:
    """What --junit-xml shows of a check. Strings only: others may not survive the way from a worker."""
    told = {name: getattr(check, name) for name in ("kind", "stage", "quantity", "layout", "policy", "case")}
    told |= {name: outcome[name] for name in ("verdict", "ratio", "first_step")}
    return [(name, str(value)) for name, value in told.items() if value is not None]


class Recorder:
    """One per process. The controller of a distributed run, which collects nothing, is told by its workers."""

    def __init__(self, config, deviations=None, earlier=None):
        self.config, self.deviations, self.earlier = config, deviations, earlier
        self.is_worker = hasattr(config, "workerinput")
        self.adapter, self.seed = self.option("adapter"), self.option("seed")
        self.collected = False  # whether a file of the suite was
        self.subject, self.plan = None, None
        self.usage_error, self.usage_error_told = "", False
        self.selected = {}  # node id -> check id
        self.outcomes = {}  # check id -> outcome
        self.shared = {}  # what a worker tells: plan, subject, environment
        self.problems, self.notes = [], []
        self.results, self.changes, self.written = None, None, []

    def option(self, name: str):
        return options.value(self.config, name)

    # -- planning --------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc):
        if not _of_the_suite_module(metafunc.module) or "check" not in metafunc.fixturenames:
            return
        self.collected = True
        kind = KIND_OF[metafunc.function.__name__]
        checks = [check for check in self._planned() if check.kind == kind]
        metafunc.parametrize("check", checks, ids=[check.id for check in checks])

    def _planned(self) -> list:
        if self.plan is None and not self.usage_error:
            try:
                self.plan = self._make_plan()
            except ValueError as error:  # raised again after collection, where pytest takes it as a usage error
                self.usage_error = str(error)
        return self.plan or []

    def plan_early(self) -> None:
        """Before pytest prints anything, so that a wrong adapter is one sentence. Raises UsageError.

        Where workers run the checks, they plan again.
        """
        self._planned()
        if self.usage_error or getattr(self.config.option, "dist", "no") != "no":
            self._stop()
            self.plan = self.subject = None
        if self.usage_error:
            raise pytest.UsageError(self.usage_error)

    def _make_plan(self) -> list:
        from .checks import plan as checks
        from .protocol.loading import load
        from .protocol.subject import Subject

        dump = self.option("dump")
        dump = self.config.invocation_params.dir / dump if dump else None
        limits = self.limits()
        if limits.isolated:
            from .protocol.isolation import IsolatedSubject

            subject = IsolatedSubject(self.adapter, limits, dump=dump)
        else:
            subject = Subject(load(self.adapter), dump=dump)
        self.subject = subject  # from here on it is closed at the end
        wanted = _names(self.option("policy"))
        for policy in wanted or ():
            if policy not in subject.description.policies:
                raise ValueError(
                    f"--policy {policy}: the adapter {self.adapter} offers {', '.join(subject.description.policies)}"
                )
        plan = list(checks.plan(subject.description, policies=wanted, seed=self.seed))
        if self.deviations:
            whole = checks.plan(subject.description, seed=self.seed) if wanted else plan
            self.problems += self.deviations.unmatched(check.id for check in whole)
        return _narrow(plan, _names(self.option("stage")))

    def limits(self):
        """Where the adapter runs. Raises ValueError for options that do not go together."""
        from .protocol.limits import Limits

        option = self.option
        return Limits.of(
            self.adapter, isolate=option("isolate"), python=option("python"), timeout=option("timeout"),
            memory=option("memory"),
        )  # fmt: skip

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self.usage_error and not self.is_worker:
            self.usage_error_told = True
            raise pytest.UsageError(self.usage_error)
        if self.collected:  # a kind without checks left a placeholder behind
            items[:] = [item for item in items if not _of_the_suite(item) or _check_of(item) is not None]
            place = {check.id: number for number, check in enumerate(self._planned())}
            items.sort(
                key=lambda item: place[_check_of(item).id] if _of_the_suite(item) else -1
            )  # others first, as they are

    def pytest_collection_finish(self, session):
        for item in session.items:
            if _check_of(item) is not None:
                self.selected[item.nodeid] = _check_of(item).id

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        found = ((node, NODE.search(node)) for node in ids)
        self.selected |= {node: match[1] for node, match in found if match}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        """The checks of one case share its run, so they go to one worker."""
        if config.option.dist != "load" or not any("conformance" in argument for argument in config.args):
            return None
        from xdist.scheduler import LoadScopeScheduling

        class ByCase(LoadScopeScheduling):
            def _split_scope(self, nodeid):
                found = NODE.search(nodeid)
                return found[1].rpartition("[")[2] if found else nodeid

            def _reschedule(self, node):
                if node in self.registered_collections:  # else it replaces a crashed worker and is still collecting
                    super()._reschedule(node)

        return ByCase(config, log)

    # -- running ---------------------------------------------------------------------------------------------------

    @staticmethod
    def about(check) -> dict:
        from .report.results import about

        return about(check)

    def run(self, check) -> tuple[dict, str]:
        """The outcome of a check, and traceback lines if it raised. Whatever it raises is an outcome."""
        from .protocol.result import AdapterError, NotOffered, frames
        from .report import results

        try:
            return results.clean(check.run(self.subject), self.about(check)), ""
        except NotOffered as error:
            return self._ended("not offered", str(error)), ""
        except AdapterError as error:
            return self._ended(error.verdict, str(error)), error.details
        except (Exception, SystemExit, pytest.skip.Exception, pytest.fail.Exception) as error:
            return self._ended("error", f"{type(error).__name__} in the suite: {error}"), frames(error)

    @staticmethod
    def _ended(verdict: str, message: str) -> dict:
        from .report.results import EMPTY

        return EMPTY | {"verdict": verdict, "message": message, "extra": {}}

    def pytest_runtest_logreport(self, report):
        check = self.selected.get(report.nodeid)
        if check is None or self.is_worker:
            return
        told = dict(report.user_properties).get(PROPERTY)
        if report.when == "call" and told is not None:
            self.outcomes[check] = json.loads(told)
        if report.failed and self.outcomes.get(check, {}).get("verdict") not in FAULTS:
            lines = [line for line in report.longreprtext.splitlines() if line.strip()]
            self.outcomes[check] = self._ended("error", lines[-1].strip() if lines else f"{report.when} failed")
        if report.failed and report.when == "teardown":
            self.problems.append(f"the teardown of {check} failed")

    # -- the end ---------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        self._stop()
        if self.is_worker:
            self.config.workeroutput[PROPERTY] = json.dumps(self._share())
            return (yield)
        self._conclude(session)
        finished = yield  # pytest prints its own last line here
        self._close()
        return finished

    def _stop(self):
        if self.subject is None:
            return
        from .protocol.result import AdapterError, NotOffered

        try:
            self.subject.close()
        except (AdapterError, NotOffered) as error:
            self.problems.append(str(error))
        self.problems += self.subject.problems
        self.notes += self.subject.notes

    def _share(self) -> dict:
        shared = {"collected": self.collected, "usage_error": self.usage_error}
        shared |= {"problems": self.problems, "notes": self.notes}
        if self.plan is not None:
            from .protocol.environment import environment

            shared |= {
                "plan": [self.about(check) for check in self.plan],
                "subject": self.subject.about(),
                "environment": environment(self.subject),
                "isolation": self.limits().to_dict(),
            }
        return shared

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        told = json.loads(getattr(node, "workeroutput", {}).get(PROPERTY, "{}"))
        self.collected |= told.get("collected", False)
        self.usage_error = self.usage_error or told.get("usage_error", "")
        self.problems += told.get("problems", [])
        self.notes += told.get("notes", [])
        torch = self.shared.get("environment", {}).get("torch")
        self.shared |= told
        if torch and self.shared.get("environment"):  # one worker may have had no check that imports it
            self.shared["environment"]["torch"] = torch

    def _conclude(self, session):
        """Build the results, write the files, and see to it that a run without a verdict does not end in 0."""
        if self.usage_error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if self.config.option.collectonly or self.usage_error or not (self.collected or self.selected):
            return
        told = self._share() if self.plan is not None else self.shared
        if "plan" not in told:  # collection failed, or no worker lived to tell
            self._fail(session)
            return
        from .report import changes, outputs, results

        self.results = results.build(
            plan=told["plan"],
            outcomes=self.outcomes,
            selected=set(self.selected.values()),
            subject=told["subject"],
            adapter=self.adapter,
            seed=self.seed,
            env=told["environment"],
            selection={
                "stage": self.option("stage"),
                "policy": self.option("policy"),
                "pyargs": self.config.option.pyargs,
                "started_by": started_by(),
            },
            problems=sorted(set(self.problems)),
            notes=sorted(set(self.notes)),
            isolation=told["isolation"],
            deviations=self.deviations,
        )
        if self.earlier is not None:
            self.changes = changes.changes(self.earlier, self.results)
        self.written = outputs.write(self.config, self.results, self.changes)
        if self.results["verdict"] != "no fault found" or self.results["counts"]["lost"]:
            self._fail(session)

    @staticmethod
    def _fail(session):
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_report_collectionfinish(self):
        if self.subject is None:
            return []
        from .report import text as report

        return report.header(self.subject.about(), self.adapter, self.seed)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter):
        if self.results is None:
            return
        from .report.summary import summary

        terminalreporter.section(f"conformance of {self.adapter}")
        for line in summary(self.results, self.changes) + self.written:
            terminalreporter.write_line(line)

    def _close(self):
        """One sentence, after everything else that is printed."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return
        if self.usage_error and not self.usage_error_told:  # a worker found it, or a node id is not in an empty plan
            terminal.write_line(f"ERROR: {self.usage_error}", red=True)
        if self.results is not None:
            from .report import text as report

            good = self.results["verdict"] == "no fault found"
            terminal.write_line(report.closing(self.results), green=good, red=not good)


def _names(option: str | None) -> list[str] | None:
    names = [name.strip() for name in (option or "").split(",") if name.strip()]
    return names or None


def _narrow(plan: list, patterns: list[str] | None) -> list:
    if patterns is None:
        return plan
    for pattern in patterns:
        if not any(fnmatchcase(check.stage, pattern) for check in plan):
            stages = dict.fromkeys(check.stage for check in plan)
            raise ValueError(f"--stage {pattern} is none of the stages planned for this adapter: {', '.join(stages)}")
    return [check for check in plan if any(fnmatchcase(check.stage, pattern) for pattern in patterns)]


def _of_the_suite(item) -> bool:
    return hasattr(item, "callspec") and _of_the_suite_module(item.module)


def _check_of(item):
    """The check of an item of the suite; None for a placeholder, and for every other item."""
    check = item.callspec.params.get("check") if _of_the_suite(item) else None
    return check if hasattr(check, "run") else None
