"""What a run leaves behind: results, report, page, badge, job summary. Paths are relative to where it was started."""

import os
from pathlib import Path

from .. import options
from . import files
from .html.page import html
from .markdown import markdown
from .summary import badge, job_summary

FILES = {
    "results": lambda results, changes: files.as_json(results),
    "report": markdown,
    "html": html,
    "badge": lambda results, changes: files.as_json(badge(results)),
}
LIMIT = 1024 * 1024 - 1  # bytes of one step's summary; GitHub drops a longer one whole


def write(config, results: dict, changes: dict | None) -> list[str]:
    """Write every file that was asked for; a line on each for the terminal."""
    told = []
    for name, render in FILES.items():
        path = options.value(config, name)
        if path:
            files.write(config.invocation_params.dir / path, render(results, changes))
            told.append(f"written: {Path(path)}")
    if options.value(config, "summary"):
        told.append(append_summary(job_summary(results, changes)))
    return told


def append_summary(text: str) -> str:
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return "no summary was written: GITHUB_STEP_SUMMARY names no file"
    already = Path(path).stat().st_size if Path(path).exists() else 0
    if already + len(text.encode()) > LIMIT:
        return "no summary was written: with it the step's would be longer than GitHub takes"
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(text)
    return "summary appended"
