"""What a run looks like on a terminal: a line of progress in place of thousands of dots, and few failures in full."""

import time

import pytest

SHOWN = 5  # failures in full; the rest are in the report, and all of them with -v
PATIENCE, INTERVAL = 1.0, 0.1  # seconds before the first line, and between two


class Terminal:
    """Registered beside the recorder, in the process that owns the terminal. ``session`` is session.state.Session."""

    def __init__(self, reporter, session):
        self.reporter, self.session = reporter, session
        self.over, self.done, self.width = False, 0, 0
        self.begun = self.drawn = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self):
        self.begun = time.monotonic()

    def live(self) -> bool:
        """Whether there is a line of progress: for checks, on a terminal. Colours are pytest's, so NO_COLOR holds."""
        if self.over or not (self.session.selected and self.reporter.isatty and self.reporter.verbosity <= 0):
            return False
        self.reporter.showfspath = self.reporter._show_progress_info = False
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        if nodeid in self.session.selected:
            self.live()  # before pytest names the file

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report):
        found = yield
        return (found[0], "", "") if report.nodeid in self.session.selected and self.live() else found

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        check = self.session.selected.get(report.nodeid)
        if check is None or report.when != "teardown":
            return
        self.done += 1
        now = time.monotonic()
        if now - self.begun > PATIENCE and now - self.drawn > INTERVAL and self.live():
            self.drawn = now
            self.draw(progress(check, self.done, len(self.session.selected), now - self.begun))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self):
        self.draw("")
        self.over = True

    def draw(self, line: str) -> None:
        """Over the last one."""
        if not line and not self.width:
            return
        line = line[: max(self.reporter._tw.fullwidth - 1, 0)]
        self.reporter.write("\r" + line.ljust(self.width) + ("" if line else "\r"), flush=True)
        self.width = len(line)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter):
        """Show the first faults in data order; the counts at the end are of all."""
        stats, results = terminalreporter.stats, self.session.results
        failed = stats.get("failed", [])
        if results is None or terminalreporter.verbosity > 0 or len(failed) <= SHOWN:
            return (yield)
        from .results import faults

        place = {check["id"]: i for i, check in enumerate(faults(results))}
        by_place = sorted(failed, key=lambda r: place.get(self.session.selected.get(r.nodeid), -1))
        stats["failed"] = by_place[:SHOWN]
        try:
            return (yield)
        finally:
            stats["failed"] = failed
            left = len(failed) - SHOWN
            told = f"{left} more failure{'s' if left > 1 else ''}"
            terminalreporter.write_line(f"{told}: see the report, or run with -v")


def progress(check: str, done: int, total: int, elapsed: float) -> str:
    """Where the run is, and how long it may yet take."""
    left = elapsed * (total - done) / done
    place = check.rpartition("[")
    return (
        f"{done} of {total}  {place[0]}  {place[2].removesuffix(']')}  about {int(left) // 60}:{int(left) % 60:02} left"
    )
