"""Whether the suite could have failed: every mutant against it, the blame it gives, and honest twins beside them."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import get_context

from conformance import adapter, checks, results
from conformance.mutants import MUTANTS
from conformance.mutants.core import Mutant

KINDS = ("trace", "stage", "end_to_end")


def subject_for(layout: str, policy: str, choices=None) -> adapter.Subject:
    """``fast`` that declares just this layout, policy and these choices."""
    from conformance.adapters.fast import POLICIES, FastAdapter

    fast = FastAdapter("eager")  # whose functions the mutants change
    fast.layouts, fast.choices = [layout], dict(choices or {})
    fast.policies, fast.formats = {policy: POLICIES[policy]}, POLICIES[policy]
    return adapter.Subject(fast)


def outcome_of(check, subject) -> dict:
    """One check's entry of the results, whatever the adapter does."""
    entry = results.about(check)
    try:
        return entry | results.clean(check.run(subject), entry)
    except adapter.NotOffered as reason:
        return entry | results.EMPTY | {"verdict": "not offered", "message": str(reason), "extra": {}}
    except adapter.AdapterError as error:
        return entry | results.EMPTY | {"verdict": "error", "message": str(error) + error.details, "extra": {}}


def outcomes(subject, kind: str, *, policy: str, methods=(), cases=(), seed: int = 0) -> list[dict]:
    plan = checks.plan(subject.description, policies=[policy], stages=methods or None, seed=seed)
    wanted = [check for check in plan if check.kind == kind and (not cases or check.case in cases)]
    return [outcome_of(check, subject) for check in wanted]


@dataclass
class Verdict:
    """What the suite said of a mutant. ``seconds`` is for the slowest ones to be found."""

    name: str
    killed: bool
    kind: str = ""
    check: str = ""
    stage: str = ""
    direction: str = ""
    step: int | None = None
    message: str = ""
    right: bool = False
    failing: int = 0
    seconds: float = field(default=0.0, compare=False)


def run_mutant(mutant: Mutant, seed: int = 0) -> Verdict:
    """The walk first, then the stages, then end to end, until one of them fails; the blame of its first fault."""
    start = time.perf_counter()
    for kind in ("stage",) if mutant.methods else KINDS:
        with mutant.change():
            subject = subject_for(mutant.layout, mutant.policy, mutant.choices)
            found = outcomes(subject, kind, policy=mutant.policy, methods=mutant.methods, seed=seed)
        faulty = results.faults({"subject": {"policies": [mutant.policy]}, "checks": found})
        if faulty:
            verdict = blamed(mutant, faulty[0])
            verdict.kind, verdict.failing, verdict.seconds = kind, len(faulty), time.perf_counter() - start
            return verdict
    return Verdict(mutant.name, False, seconds=time.perf_counter() - start)


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


def blamed(mutant: Mutant, check: dict) -> Verdict:
    stage, direction = results.blamed_stage(check), direction_of(check)
    right = (
        stage.partition(".")[0] == mutant.stage
        and direction in (("forward", "backward") if mutant.direction == "graph" else (mutant.direction,))
        and (mutant.step is None or check["first_step"] == mutant.step)
        and mutant.says in check["message"]
    )  # fmt: skip
    return Verdict(
        mutant.name, True, check=check["id"], stage=stage, direction=direction, step=check["first_step"],
        message=check["message"], right=right,
    )  # fmt: skip


def one_thread() -> None:
    """One thread a process: the twin's arrays are small, and two processes share the machine."""
    import torch

    torch.set_num_threads(1)


def _run(name: str) -> Verdict:
    return run_mutant(next(mutant for mutant in MUTANTS if mutant.name == name))


def run_all(names: Iterable[str], processes: int = 2) -> Iterable[Verdict]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with get_context("spawn").Pool(processes, one_thread) as pool:
        yield from pool.imap(_run, list(names), chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    names = [m.name for m in MUTANTS if not arguments.names or m.name in arguments.names or m.area in arguments.names]
    expected = {m.name: m for m in MUTANTS}
    for verdict in run_all(names, arguments.processes):
        mutant = expected[verdict.name]
        state = "survived" if not verdict.killed else "right" if verdict.right else "WRONG"
        if not verdict.killed or not verdict.right:
            print(
                f"{state:9}{verdict.name}: wanted {mutant.stage} {mutant.direction} {mutant.step}; "
                f"got {verdict.stage} {verdict.direction} {verdict.step} {verdict.check} {verdict.message[:300]}"
            )
        else:
            print(f"{state:9}{verdict.name}: {verdict.check} {verdict.failing} {verdict.seconds:.1f} s")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
