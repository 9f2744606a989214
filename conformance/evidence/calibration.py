"""Bounds under test: honest twins, the worst ratio of each stage, and what the number of samples leads to expect.

A run is one unroll of one twin (policy, layout, case, seed) and the walk along it, with the gradients end to end. Any
alarm is a defect of the suite. A worst ratio far below the expected one says that the bound is too wide.

    python -m draftconf.conformance.evidence.calibration docs/calibration.md --seeds 4 --processes 2
"""

import argparse
import os
from collections import defaultdict
from dataclasses import dataclass, field
from math import log, sqrt
from multiprocessing import get_context
from pathlib import Path

from draftconf.reference.bounds import LAMBDA
from draftconf.reference.config import kind_of

from ..checks.cases import unroll_cases
from ..checks.unroll import UnrollRun
from ..judging.bias import BIAS_LIMIT
from ..protocol.loading import load
from ..protocol.subject import Subject
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
        """The largest of so many ratios, were every rounding uniform: sqrt(2 ln N) / (sqrt(3) lambda)."""
        return sqrt(2 * log(max(self.compared, 2))) / (sqrt(3) * LAMBDA)


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
    twin, found = next(t for t in TWINS if t.name == name), Population()
    with twin.change():
        subject = Thinning(twin)
        for case in unroll_cases():
            walked = UnrollRun(subject, case, subject.description.choices_for(layout), policy, seed)
            count(found, walked.walk, policy, f"{name}, {layout}, {case.name}, seed {seed}")
        subject.stop()
    return found


def count(found: Population, walk, policy: str, where: str) -> None:
    found.runs += 1
    for edge in walk.edges:
        if not edge.ok:
            found.alarms.append(f"{policy}, {where}: step {edge.step}, {edge.stage} ({edge.quantity})")
        if edge.comparison:
            key = policy, kind_of(edge.stage), edge.quantity
            found.tallies[key].add(edge.comparison.compared, edge.comparison.ratio, where)
    for (stage, quantity), pool in walk.bias.items():
        z = None if any(edge.hidden for edge in walk.of(stage, quantity)) else pool.z()
        if z is not None:
            tally = found.tallies[policy, stage, quantity]
            tally.bias = max(tally.bias, abs(z))
            if abs(z) > BIAS_LIMIT:
                found.alarms.append(f"{policy}, {where}: bias of {stage} ({quantity}) is {z:.3g}")


def tasks(seeds: range, policies=("float64", "float32", "bfloat16"), layouts=("mtp", "eagle3")) -> list[tuple]:
    return [(t.name, p, lay, s) for p in policies for t in by_policy(p) for lay in layouts for s in seeds]


def population(work: list[tuple], processes: int = 1) -> Population:
    """All runs, over so many processes."""
    found = Population()
    if processes <= 1:
        for task in work:
            found.merge(run(task))
        return found
    os.environ["OMP_NUM_THREADS"] = "1"
    with get_context("spawn").Pool(processes) as pool:
        for part in pool.imap_unordered(run, work, chunksize=1):
            found.merge(part)
    return found


def markdown(found: Population) -> str:
    lines = [
        "# Calibration: the bounds against honest twins",
        "",
        f"{found.runs} runs of {len(TWINS)} honest twins of `fast` (conformance/evidence/twins.py):",
        f"{len(found.alarms)} false alarms. Generated by `make calibrate`. *worst* is the largest error over its",
        "bound; *expected* what the largest of so many independent uniform roundings would show, where a stage is",
        "all accumulation. A stage whose own rounding to storage dominates reaches 1, one whose sums are exact",
        f"(products of few-bit values) 0. *bias* is the largest |z|, limit {BIAS_LIMIT:.2f}.",
    ]
    lines += ["", *(f"- {alarm}" for alarm in found.alarms)] if found.alarms else []
    for policy in dict.fromkeys(key[0] for key in sorted(found.tallies)):
        lines += [
            "",
            f"## {policy}",
            "",
            "| stage | quantity | compared | worst | expected | bias | arrays by tenths of the bound | worst in |",
        ]
        lines.append("|---|---|---|---|---|---|---|---|")
        for (_, stage, quantity), tally in sorted((k, t) for k, t in found.tallies.items() if k[0] == policy):
            lines.append(
                f"| {stage} | {quantity} | {tally.compared} | {tally.worst:.2g} | {tally.expected():.2g} | "
                f"{tally.bias:.2g} | {' '.join(map(str, tally.histogram))} | {tally.twin} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    found = population(tasks(range(options.seeds)), options.processes)
    target = Path(options.file)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(markdown(found), encoding="utf-8")
    partial.replace(target)
    print(f"{found.runs} runs, {len(found.alarms)} false alarms")


if __name__ == "__main__":
    main()
