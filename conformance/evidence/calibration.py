"""Bounds under test: honest twins, the worst ratio of each stage, and what the number of samples leads to expect.

A run is one unroll of one twin (policy, layout, case, seed) and the walk along it, with the gradients end to end. Any
alarm is a defect of the suite. A worst ratio far below the expected one says that the bound is too wide.

    python -m draftconf.conformance.evidence.calibration --data FILE.json --page FILE.md --seeds 4 --processes 2
"""

import argparse
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from math import log, sqrt
from multiprocessing import get_context

from draftconf.reference.bounds import LAMBDA
from draftconf.reference.config import kind_of

from ..checks.cases import unroll_cases
from ..checks.unroll import UnrollRun
from ..checks.walk import Walk
from ..judging.bias import BIAS_LIMIT
from ..protocol.loading import load
from ..protocol.subject import Subject
from ..report import files
from ..report.fingerprint import measured, measured_with
from .twins import TWINS, by_policy

BINS = 10  # of error over bound, from 0 to 1; an alarm counts in the last


@dataclass
class Tally:
    """Of one policy, stage and quantity: how many numbers were compared, the worst ratio and the worst bias."""

    compared: int = 0
    worst: float = 0.0
    bias: float = 0.0
    twin: str = ""
    histogram: list = field(default_factory=lambda: [0] * BINS)  # of the worst ratio of each array

    def add(self, compared: int, ratio: float, twin: str) -> None:
        self.compared += compared
        self.histogram[min(int(ratio * BINS), BINS - 1)] += 1
        self.keep(ratio, twin)

    def merge(self, other: "Tally") -> None:
        self.compared += other.compared
        self.bias = max(self.bias, other.bias)
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]
        self.keep(other.worst, other.twin)

    def keep(self, ratio: float, twin: str) -> None:
        if ratio >= self.worst:
            self.worst, self.twin = ratio, twin

    def expected(self) -> float:
        return expected(self.compared)


def expected(compared: int) -> float:
    """The largest of so many ratios, were every rounding uniform: sqrt(2 ln N) / (sqrt(3) lambda)."""
    return sqrt(2 * log(max(compared, 2))) / (sqrt(3) * LAMBDA)


@dataclass
class Population:
    """What all runs together showed."""

    runs: int = 0
    alarms: list = field(default_factory=list)
    tallies: dict = field(default_factory=lambda: defaultdict(Tally))

    def merge(self, other: "Population") -> None:
        self.runs += other.runs
        self.alarms += other.alarms
        for key, tally in other.tallies.items():
            self.tallies[key].merge(tally)


class Thinning(Subject):
    """``fast`` whose trace passes through a twin's ``trace``."""

    def __init__(self, twin):
        super().__init__(load("fast"))
        self.twin = twin

    def call(self, method, **keywords):
        result = super().call(method, **keywords)
        result.trace = self.twin.trace(result.trace)
        return result


def run(task: tuple) -> Population:
    """One twin on every case of one policy, layout and seed."""
    name, policy, layout, seed = task
    twin, all_cases = next(t for t in TWINS if t.name == name), Population()
    with twin.change():
        subject = Thinning(twin)
        for case in unroll_cases():
            walked = UnrollRun(subject, case, subject.description.choices_for(layout), policy, seed)
            count(all_cases, walked.walk, policy, f"{name}, {layout}, {case.name}, seed {seed}")
        subject.stop()
    return all_cases


def count(population: Population, walk: Walk, policy: str, where: str) -> None:
    """Add what one walk measured."""
    population.runs += 1
    for edge in walk.edges:
        if not edge.ok:
            population.alarms.append(f"{policy}, {where}: step {edge.step}, {edge.stage} ({edge.quantity})")
        if edge.comparison:
            key = policy, kind_of(edge.stage), edge.quantity
            population.tallies[key].add(edge.comparison.compared, edge.comparison.ratio, where)
    for (stage, quantity), pool in walk.bias.items():
        z = None if any(edge.hidden for edge in walk.of(stage, quantity)) else pool.z()
        if z is not None:
            tally = population.tallies[policy, stage, quantity]
            tally.bias = max(tally.bias, abs(z))
            if abs(z) > BIAS_LIMIT:
                population.alarms.append(f"{policy}, {where}: bias of {stage} ({quantity}) is {z:.3g}")


def tasks(seeds: range, policies=("float64", "float32", "bfloat16"), layouts=("mtp", "eagle3")) -> list[tuple]:
    return [(t.name, p, lay, s) for p in policies for t in by_policy(p) for lay in layouts for s in seeds]


def population(work: list[tuple], processes: int = 1) -> Population:
    """All runs, over so many processes."""
    runs = Population()
    if processes <= 1:
        for task in work:
            runs.merge(run(task))
        return runs
    os.environ["OMP_NUM_THREADS"] = "1"
    with get_context("spawn").Pool(processes) as pool:
        for part in pool.imap_unordered(run, work, chunksize=1):
            runs.merge(part)
    return runs


# -- CALIBRATION.md ----------------------------------------------------------------------------------------------------

KEY = ("policy", "stage", "quantity")


def everything(population: Population) -> dict:
    """What the page is rendered from."""
    tallies = [dict(zip(KEY, key, strict=True)) | asdict(tally) for key, tally in sorted(population.tallies.items())]
    return {
        **measured(),
        "twins": len(TWINS),
        "bias_limit": BIAS_LIMIT,
        "runs": population.runs,
        "alarms": population.alarms,
        "tallies": tallies,
    }


def markdown(data: dict) -> str:
    lines = [
        "# Calibration: the bounds against honest twins",
        "",
        f"{data['runs']} runs of {data['twins']} honest twins of `fast` (conformance/evidence/twins.py):",
        f"{len(data['alarms'])} false alarms. Generated by `make calibrate`. *worst* is the largest error over its",
        "bound; *expected* what the largest of so many independent uniform roundings would show, where a stage is",
        "all accumulation. A stage whose own rounding to storage dominates reaches 1, one whose sums are exact",
        f"(products of few-bit values) 0. *bias* is the largest |z|, limit {data['bias_limit']:.2f}.",
        measured_with(data),
    ]
    lines += ["", *(f"- {alarm}" for alarm in data["alarms"])] if data["alarms"] else []
    head = "| stage | quantity | compared | worst | expected | bias | arrays by tenths of the bound | worst in |"
    for policy in dict.fromkeys(tally["policy"] for tally in data["tallies"]):
        lines += ["", f"## {policy}", "", head, "|---|---|---|---|---|---|---|---|"]
        lines += [row(tally) for tally in data["tallies"] if tally["policy"] == policy]
    return "\n".join(lines) + "\n"


def row(tally: dict) -> str:
    numbers = (f"{x:.2g}" for x in (tally["worst"], expected(tally["compared"]), tally["bias"]))
    histogram = " ".join(map(str, tally["histogram"]))
    cells = [tally["stage"], tally["quantity"], str(tally["compared"]), *numbers, histogram, tally["twin"]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="FILE.json")
    parser.add_argument("--page", required=True, metavar="FILE.md")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    data = everything(population(tasks(range(options.seeds)), options.processes))
    files.write(options.data, files.as_rows(data))
    files.write(options.page, markdown(data))
    print(f"{data['runs']} runs, {len(data['alarms'])} false alarms")


if __name__ == "__main__":
    main()
