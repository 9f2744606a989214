"""What one process knows of a run. Imports nothing heavy: the plugin makes one in every pytest run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..protocol.limits import Limits


@dataclass
class Session:
    """Planning, running and concluding fill it, in this order. The controller of a distributed run, which collects
    nothing, gets ``shared`` from its workers in place of a subject and a plan.
    """

    options: dict[str, Any]  # options.values of the run
    folder: Path  # that it was started in
    pyargs: bool = False
    started_by: str = "pytest"
    deviations: Any = None  # report.deviations.Deviations, where a file of them was named
    earlier: dict | None = None  # the results to compare with

    collected: bool = False  # whether a file of the suite was
    subject: Any = None
    plan: list | None = None
    usage_error: str = ""
    selected: dict[str, str] = field(default_factory=dict)  # node id -> check id
    outcomes: dict[str, dict] = field(default_factory=dict)  # check id -> outcome
    shared: dict[str, Any] = field(default_factory=dict)  # of workers: plan, subject, environment, isolation
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    results: dict | None = None
    changes: dict | None = None
    written: list[str] = field(default_factory=list)

    @property
    def adapter(self) -> str:
        return self.options["adapter"]

    @property
    def seed(self) -> int:
        return self.options["seed"]

    def limits(self) -> Limits:
        """Where the adapter runs. Raises ValueError for options that do not go together."""
        names = ("isolate", "python", "timeout", "memory")
        return Limits.of(self.adapter, **{name: self.options[name] for name in names})
