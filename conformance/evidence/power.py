"""Whether the suite could have failed: mutants, null adapters and honest twins of ``fast`` against it.

python -m draftconf.conformance.evidence.power --data FILE.json --page FILE.md   everything
python -m draftconf.conformance.evidence.power --only NAME ...                   these mutants or areas, on the terminal
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from ..adapters.fast import POLICIES, FastAdapter
from ..checks import plan as checks
from ..protocol.result import AdapterError, NotOffered, Result
from ..protocol.subject import Subject
from ..report import files, results
from ..report.fingerprint import measured
from .mutants import MUTANTS, NOT_EXPRESSIBLE, Mutant
from .mutants.core import everywhere
from .mutants.precision import stochastic_stores
from .nulls import NULLS, Previous
from .power_report import digest, markdown
from .twins import TWINS, Twin

KINDS = ("trace", "stage", "end_to_end")
LAYOUTS = ("mtp", "eagle3")


def subject_for(
    layout: str, policy: str, choices: Mapping | None = None, formats: Mapping | None = None, kind: Callable = Subject
) -> Subject:
    """``fast`` that declares just this layout, policy and these choices, as a subject of class ``kind``."""
    fast = FastAdapter("eager")  # whose functions the mutants change
    fast.layouts, fast.choices = [layout], dict(choices or {})
    fast.formats = POLICIES[policy] | (formats or {})
    fast.policies = {policy: fast.formats}
    return kind(fast)


def outcome_of(check, subject) -> dict:
    """One check's entry of the results, whatever the adapter does."""
    entry = results.about(check)
    try:
        return entry | results.clean(check.run(subject), entry)
    except NotOffered as reason:
        return entry | results.EMPTY | {"verdict": "not offered", "message": str(reason), "extra": {}}
    except AdapterError as error:
        ended = {"verdict": error.verdict, "message": str(error) + error.details, "extra": {}}
        return entry | results.EMPTY | ended


def outcomes(subject, kinds: Iterable[str], *, methods=(), cases=(), seed: int = 0) -> list[dict]:
    plan = checks.plan(subject.description, stages=methods or None, seed=seed)
    wanted = [check for check in plan if check.kind in kinds and (not cases or check.case in cases)]
    return [outcome_of(check, subject) for check in wanted]


def faults(subject: Subject, checks: list[dict]) -> list[dict]:
    """Those of ``checks`` that fail, the first in data order first."""
    return results.faults({"subject": {"policies": list(subject.description.policies)}, "checks": checks})


# -- mutants -----------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What the suite makes of a mutant: the first fault, and which way it shows."""

    name: str
    killed: bool = False
    kind: str = ""
    check: str = ""
    stage: str = ""
    direction: str = ""
    step: int | None = None
    right: bool = False
    failing: int = 0
    message: str = ""


def run_mutant(mutant: Mutant, seed: int = 0) -> Verdict:
    """The walk first, then the stages, then end to end, until one of them fails; the blame of its first fault."""
    for kind in ("stage",) if mutant.methods else KINDS:
        with mutant.change():
            subject = subject_for(mutant.layout, mutant.policy, mutant.choices)
            failing = faults(subject, outcomes(subject, (kind,), methods=mutant.methods, seed=seed))
        if failing:
            return blamed(mutant, kind, failing)
    return Verdict(mutant.name)


def blamed(mutant: Mutant, kind: str, failing: list[dict]) -> Verdict:
    """The blame of the first of the failing checks, held against the one that the mutant must get."""
    first = failing[0]
    stage, direction, step = results.blamed_stage(first), direction_of(first), first["first_step"]
    directions = ("forward", "backward") if mutant.direction == "graph" else (mutant.direction,)
    right = (
        stage.partition(".")[0] == mutant.stage
        and direction in directions
        and mutant.step in (None, step)
        and mutant.says in first["message"]
    )
    return Verdict(mutant.name, True, kind, first["id"], stage, direction, step, right, len(failing), first["message"])


DECISIONS = ("decision", "experts", "mx_input", "mx_hidden", "below")


def direction_of(check: dict) -> str:
    """Which way the fault was seen."""
    quantity = check["quantity"]
    if quantity == "frozen" or "changed its input" in check["message"]:
        return "frozen"
    if quantity in DECISIONS:
        return "decision"
    if quantity in ("cotangent", "gradient", "gradient_set") or quantity.startswith("d_"):
        return "backward"
    return "forward"


# -- null adapters -----------------------------------------------------------------------------------------------------


FROZEN = "unroll.frozen.end"  # says nothing of an answer that has no gradient for frozen arrays


@dataclass
class NullVerdict:
    """``escaped``: offered methods without a failing check, and end-to-end checks that passed. ``passed``: what it got
    right in every case; ``undecided`` counts the checks that say so.
    """

    name: str
    layout: str
    checks: int
    failed: int
    undecided: int
    escaped: list[str]
    passed: list[str]


def run_null(name: str, layout: str, policy: str = "float32", cases=()) -> NullVerdict:
    subject = NULLS[name](subject_for(layout, policy))
    if isinstance(subject, Previous):
        outcomes(subject, KINDS, cases=cases, seed=1)
    ran = [check for check in outcomes(subject, KINDS, cases=cases) if check["verdict"] != "not offered"]
    verdicts: dict[str, set] = {}
    for check in ran:
        verdicts.setdefault(check["stage"] if check["kind"] == "stage" else "unroll", set()).add(check["verdict"])
    escaped = sorted(method for method, theirs in verdicts.items() if not theirs & set(results.FAULTS))
    for check in ran:
        if check["kind"] == "end_to_end" and check["verdict"] == "pass" and not check["id"].startswith(FROZEN):
            escaped.append(check["id"])
    count = Counter(check["verdict"] for check in ran)
    failed = sum(count[verdict] for verdict in results.FAULTS)
    return NullVerdict(name, layout, len(ran), failed, count["undecided"], escaped, always_right(ran))


def always_right(checks: list[dict]) -> list[str]:
    """What passed wherever it was asked: stage or method, quantity, and look."""
    asked: dict[str, set] = {}
    for check in checks:
        asked.setdefault(f"{check['stage']}.{check['quantity']} ({check['kind']})", set()).add(check["verdict"])
    return sorted(what for what, verdicts in asked.items() if verdicts == {"pass"})


# -- honest twins ------------------------------------------------------------------------------------------------------


@dataclass
class Honest:
    """Runs of one twin and what they raised; a run is one unroll and its walk, or one case's stage checks."""

    twin: str
    layout: str
    policy: str
    runs: int
    checks: int
    alarms: list[str]


def honest_twins() -> list:
    """The population of conformance.twins, and stochastic rounding for those who declare it."""
    return [
        *TWINS,
        Twin("stochastic rounding", lambda: everywhere("linear", stochastic_stores), policies=("bfloat16",)),
    ]


def run_honest(task: tuple) -> Honest:
    name, layout, policy, seed, kind = task
    twin = next(twin for twin in honest_twins() if twin.name == name)
    formats = {"rounding": "stochastic"} if name == "stochastic rounding" else {}
    with twin.change():
        subject = subject_for(layout, policy, formats=formats, kind=partial(Thinned, twin.trace))
        ran = outcomes(subject, (kind,), seed=seed)
    alarms = [f"{name}, seed {seed}: {check['id']}: {check['message']}" for check in faults(subject, ran)]
    return Honest(name, layout, policy, len({check["case"] for check in ran}), len(ran), alarms)


class Thinned(Subject):
    """A subject whose trace passes through ``thin``."""

    def __init__(self, thin: Callable[[dict], dict], fast):
        super().__init__(fast)
        self.thin = thin

    def call(self, method: str, **keywords) -> Result:
        result = super().call(method, **keywords)
        result.trace = self.thin(result.trace)
        return result


def honest_tasks(seeds: int) -> list[tuple]:
    """Walks on every seed, stage checks on the first one where the twin changes more than its trace."""
    tasks = []
    for twin in honest_twins():
        for layout in LAYOUTS:
            for policy in twin.policies:
                tasks += [(twin.name, layout, policy, seed, "trace") for seed in range(seeds)]
                tasks += [(twin.name, layout, policy, 0, "stage")] if twin.trace is dict else []
    return tasks


# -- all of it ---------------------------------------------------------------------------------------------------------


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _mutant(name: str) -> Verdict:
    return run_mutant(next(mutant for mutant in MUTANTS if mutant.name == name))


def _null(task: tuple) -> NullVerdict:
    return run_null(*task)


def spread(function: Callable, tasks: list, processes: int) -> Iterator:
    """``function`` of every task, in order, over so many processes of one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with get_context("spawn").Pool(processes, one_thread) as pool:
        yield from pool.imap(function, tasks, chunksize=1)


def select(names: Iterable[str]) -> list[Mutant]:
    chosen = set(names)
    return [m for m in MUTANTS if not chosen or {m.name, m.area} & chosen]


def line(mutant: Mutant, verdict: Verdict) -> str:
    """One mutant on the terminal."""
    if not verdict.killed:
        return f"survived  {mutant.name}"
    blame = f"{verdict.stage} {verdict.direction} {verdict.step}, {verdict.check}: {verdict.message[:200]}"
    if verdict.right:
        return f"right     {mutant.name}: {blame}"
    return f"WRONG     {mutant.name}: wanted {mutant.stage} {mutant.direction} {mutant.step}, got {blame}"


def mutant_entry(mutant: Mutant, verdict: Verdict) -> dict:
    """A mutant and its verdict, in JSON's types."""
    facts = {name: value for name, value in vars(mutant).items() if name not in ("change", "says")}
    facts |= {"choices": dict(mutant.choices), "methods": list(mutant.methods)}
    return facts | {"verdict": asdict(verdict)}


def everything(mutants: list[dict], nulls: Iterable[NullVerdict], honest: Iterable[Honest]) -> dict:
    """What POWER.md is rendered from."""
    return {
        **measured(),
        "mutants": mutants,
        "not_expressible": NOT_EXPRESSIBLE,
        "nulls": [asdict(each) for each in nulls],
        "honest": [asdict(each) for each in honest],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="FILE.json")
    parser.add_argument("--page", type=Path, metavar="FILE.md")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    mutants, entries = select(options.only), []
    for mutant, verdict in zip(mutants, spread(_mutant, [m.name for m in mutants], options.processes), strict=True):
        entries.append(mutant_entry(mutant, verdict))
        print(line(mutant, verdict), flush=True)
    if options.only or not (options.data and options.page):
        return
    nulls = spread(_null, [(name, layout) for name in NULLS for layout in LAYOUTS], options.processes)
    honest = spread(run_honest, honest_tasks(options.seeds), options.processes)
    data = everything(entries, nulls, honest)
    files.write(options.data, files.as_rows(data))
    files.write(options.page, markdown(data))
    files.write(Path(__file__).with_name("measured_power.md"), digest(data))


if __name__ == "__main__":
    main()
