"""The pytest plugin: options, one item per check, the guards against a run that looks green and is not, the verdict.

Hooks only; what they do is in ``session/``. Import-light on purpose: every pytest run in an environment where the suite
is installed loads it, so NumPy, the oracle and the adapter are imported only once a file of ``conformance/`` has been
collected. Outcomes travel in ``report.user_properties`` as a JSON string, since that alone reaches the controller of
pytest-xdist unharmed.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from . import options
from .report.progress import Terminal
from .session.state import Session

RECORDER = "draftconf-recorder"
PROPERTY = "draftconf"
SUITE = "draftconf.conformance"
KIND_OF = {"test_stage": "stage", "test_trace": "trace", "test_end_to_end": "end_to_end"}
MODULES = ("test_stages", "test_trace", "test_end_to_end")  # beside this file
FAULTS = ("fail", "error", "crash", "timeout")
NODE = re.compile(r"::(?:test_stage|test_trace|test_end_to_end)\[(.+\[.+\])\]")


def pytest_addoption(parser):
    options.add(parser)


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been set up
def pytest_configure(config):
    if config.option.pyargs:  # in a checkout the suite lies beside the folder of that name, not in it
        config.args[:] = [SUITE if argument == SUITE.partition(".")[0] else argument for argument in config.args]
    try:
        recorder = Recorder(config, _session(config))
        if recorder.session.started_by == "conform" and not recorder.is_worker:
            recorder.plan_early()
    except pytest.UsageError as error:
        if started_by() != "conform":
            raise
        print(f"conform: {' '.join(str(error).split())}", file=sys.stderr)
        raise pytest.UsageError from error
    config.pluginmanager.register(recorder, RECORDER)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not recorder.is_worker:
        config.pluginmanager.register(Terminal(reporter, recorder.session), f"{RECORDER}-terminal")


def started_by() -> str:
    """The command that was run: ``pytest``, or ``conform`` around it."""
    return os.environ.get(options.STARTED_BY, "pytest")


def _session(config) -> Session:
    """Deviations and earlier results are read before anything runs, so that a mistake in them costs nothing."""
    return Session(
        options.values(config), config.invocation_params.dir, config.option.pyargs, started_by(),
        deviations=_deviations(config), earlier=_earlier(config),
    )  # fmt: skip


def _earlier(config):
    """The results to compare with, or None."""
    path = options.value(config, "compare")
    if not path or hasattr(config, "workerinput"):
        return None
    from .report import changes

    try:
        return changes.read(config.invocation_params.dir / path)
    except ValueError as error:
        raise pytest.UsageError(f"--compare {path}: {error}") from error


def _deviations(config):
    """The entries of the file, or None."""
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
    from .report.results import about
    from .report.text import failure
    from .session import running

    session = request.config.pluginmanager.get_plugin(RECORDER).session
    outcome, details = running.run(session, check)
    properties = running.properties(check, outcome)
    request.node.user_properties += [(PROPERTY, json.dumps(outcome, allow_nan=False)), *properties]
    if outcome["verdict"] in FAULTS:
        entry, words = about(check) | outcome, session.limits().options
        command = repeat_command(entry, session.adapter, session.seed, session.pyargs, words, session.started_by)
        pytest.fail(failure(entry, command, details), pytrace=False)
    if outcome["verdict"] == "not offered":
        pytest.skip(outcome["message"] or "not offered")
    if outcome["verdict"] == "known deviation":
        pytest.xfail(outcome["extra"]["deviation"]["reason"])


class Recorder:
    """One per process."""

    def __init__(self, config, session: Session):
        self.config, self.session = config, session
        self.is_worker = hasattr(config, "workerinput")
        self.usage_error_printed = False

    # -- planning ------------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc):
        if not _of_the_suite_module(metafunc.module) or "check" not in metafunc.fixturenames:
            return
        self.session.collected = True
        kind = KIND_OF[metafunc.function.__name__]
        checks = [check for check in self._planned() if check.kind == kind]
        metafunc.parametrize("check", checks, ids=[check.id for check in checks])

    def _planned(self) -> list:
        if self.session.plan is None and not self.session.usage_error:
            from .session.planning import make_plan

            try:
                self.session.plan = make_plan(self.session)
            except ValueError as error:  # raised again after collection, where pytest takes it as a usage error
                self.session.usage_error = str(error)
        return self.session.plan or []

    def plan_early(self) -> None:
        """Before pytest prints anything, so that a wrong adapter is one sentence. Raises UsageError.

        Where workers run the checks, they plan again.
        """
        self._planned()
        if self.session.usage_error or getattr(self.config.option, "dist", "no") != "no":
            self._close_subject()
            self.session.plan = self.session.subject = None
        if self.session.usage_error:
            raise pytest.UsageError(self.session.usage_error)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self.session.usage_error and not self.is_worker:
            self.usage_error_printed = True
            raise pytest.UsageError(self.session.usage_error)
        if self.session.collected:  # a kind without checks left a placeholder behind
            items[:] = [item for item in items if not _of_the_suite(item) or _check_of(item) is not None]
            place = {check.id: number for number, check in enumerate(self._planned())}
            items.sort(
                key=lambda item: place[_check_of(item).id] if _of_the_suite(item) else -1
            )  # others first, as they are

    def pytest_collection_finish(self, session):
        checks = ((item.nodeid, _check_of(item)) for item in session.items)
        self.session.selected |= {node: check.id for node, check in checks if check is not None}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        matches = ((node, NODE.search(node)) for node in ids)
        self.session.selected |= {node: match[1] for node, match in matches if match}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        """The checks of one case share its run, so they go to one worker."""
        names = ("conformance", "draftconf")
        if config.option.dist != "load" or not any(name in argument for argument in config.args for name in names):
            return None
        from .session.scheduling import by_case

        return by_case(config, log, NODE)

    # -- running -------------------------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report):
        check, outcomes = self.session.selected.get(report.nodeid), self.session.outcomes
        if check is None or self.is_worker:
            return
        recorded = dict(report.user_properties).get(PROPERTY)
        if report.when == "call" and recorded is not None:
            outcomes[check] = json.loads(recorded)
        if report.failed and outcomes.get(check, {}).get("verdict") not in FAULTS:
            from .session.running import ended

            lines = [line for line in report.longreprtext.splitlines() if line.strip()]
            outcomes[check] = ended("error", lines[-1].strip() if lines else f"{report.when} failed")
        if report.failed and report.when == "teardown":
            self.session.problems.append(f"the teardown of {check} failed")

    # -- concluding ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        self._close_subject()
        if self.is_worker:
            self.config.workeroutput[PROPERTY] = json.dumps(self._share())
            return (yield)
        self._conclude(session)
        finished = yield  # pytest prints its own last line here
        self._print_last_line()
        return finished

    def _close_subject(self) -> None:
        if self.session.subject is not None:
            from .session.concluding import close

            close(self.session)

    def _share(self) -> dict:
        if not (self.session.collected or self.session.usage_error):
            return {}
        from .session.concluding import share

        return share(self.session)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        shared = json.loads(getattr(node, "workeroutput", {}).get(PROPERTY, "{}"))
        if shared:
            from .session.concluding import merge

            merge(self.session, shared)

    def _conclude(self, session) -> None:
        """Build the results, write the files, and see to it that a run without a verdict does not end in 0."""
        ours = self.session
        if ours.usage_error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if self.config.option.collectonly or ours.usage_error or not (ours.collected or ours.selected):
            return
        from .report import outputs
        from .session.concluding import conclude, conforms

        concluded = conclude(ours)
        if concluded:
            ours.written = outputs.write(self.config, ours.results, ours.changes)
        passed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if passed and not (concluded and conforms(ours)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_report_collectionfinish(self):
        if self.session.subject is None:
            return []
        from .report.text import header

        return header(self.session.subject.about(), self.session.adapter, self.session.seed)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter):
        if self.session.results is None:
            return
        from .report.summary import summary

        terminalreporter.section(f"conformance of {self.session.adapter}")
        for line in summary(self.session.results, self.session.changes) + self.session.written:
            terminalreporter.write_line(line)

    def _print_last_line(self) -> None:
        """One sentence, after everything else that is printed."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return
        usage_error = self.session.usage_error
        if usage_error and not self.usage_error_printed:  # a worker found it, or a node id is not in an empty plan
            terminal.write_line(f"ERROR: {usage_error}", red=True)
        if self.session.results is not None:
            from .report.text import closing

            good = self.session.results["verdict"] == "no fault found"
            terminal.write_line(closing(self.session.results), green=good, red=not good)


def _of_the_suite_module(module) -> bool:
    """Whatever name it was imported by: a checkout's goes by its folder."""
    file = Path(module.__file__)
    return file.stem in MODULES and file.parent.resolve() == Path(__file__).resolve().parent


def _of_the_suite(item) -> bool:
    return hasattr(item, "callspec") and _of_the_suite_module(item.module)


def _check_of(item):
    """The check of an item of the suite; None for a placeholder, and for every other item."""
    check = item.callspec.params.get("check") if _of_the_suite(item) else None
    return check if hasattr(check, "run") else None
