"""Whether a change of the suite changed what it says: every verdict, blame and ratio, before and after.

python -m draftconf.conformance.evidence.same_verdicts since REVISION     that revision against the working tree
python -m draftconf.conformance.evidence.same_verdicts store FILE         what the working tree says now
python -m draftconf.conformance.evidence.same_verdicts compare OLD [NEW]  two such files, or one and the working tree

Asked are the repository's own adapters, a sample of mutants and a sample of honest twins. A revision's answers are
collected by that revision's own copy of this module, so the file knows nothing of how the suite is built inside: ids,
verdicts, numbers. Exit status: 0 the same, 1 not the same, 2 cannot be told.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import torch

from ..protocol.loading import load
from ..protocol.subject import Subject
from ..report import results
from ..report.files import write
from . import power
from .mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("build", "verdicts")
COLLECTOR = "conformance/evidence/same_verdicts.py"  # where a revision is looked up for this module
FORMAT = 1
PROCESSES = 2

ADAPTERS = ("fast_fused", "fast", "reference")  # the longest first, so that no process ends long before the other
EVERY = 40  # of alike mutants that need an unroll: ten seconds each
TWINS = 20

KEPT = ("verdict", "ratio", "bias", "first_step", "compared", "decisions")
NUMBERS = ("ratio", "bias", "width")
TOLERANCE = 1e-12  # relative, of a number: what another order of two float64 operations may do
SHOWN = 40

Task = tuple[str, ...]
NUMERAL = re.compile(r"(?<![A-Za-z_0-9])[-+]?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan)\b")
FRAMES = re.compile(r"\S*\.py:\d+ in .*", re.DOTALL)  # of a traceback, which name lines of the suite


# -- what is asked -----------------------------------------------------------------------------------------------------


def sampled_mutants() -> list[Mutant]:
    """All that are put before single methods, which is quick; of the others, one of each sort and every 40th more."""
    unrolled: dict[tuple, list[Mutant]] = {}
    for mutant in sorted(MUTANTS, key=by_hash):
        if not mutant.methods:
            at_the_end = mutant.stage == "unroll"  # where no single stage is to blame
            sort = (mutant.area, mutant.direction, mutant.layout, mutant.policy, at_the_end)
            unrolled.setdefault(sort, []).append(mutant)
    slow = [mutant for alike in unrolled.values() for mutant in alike[::EVERY]]
    return slow + [mutant for mutant in MUTANTS if mutant.methods]


def sampled_twins() -> list[Task]:
    """One layout and one policy each, in turn."""
    chosen = sorted(power.honest_twins(), key=by_hash)[:TWINS]
    return [
        (twin.name, power.LAYOUTS[i % len(power.LAYOUTS)], twin.policies[i % len(twin.policies)])
        for i, twin in enumerate(chosen)
    ]


def by_hash(named) -> str:
    """An order that does not hang on where a mutant or twin is defined, so that moving it leaves the sample alone."""
    return sha256(named.name.encode()).hexdigest()


def tasks() -> list[Task]:
    return [
        *(("adapter", name) for name in ADAPTERS),
        *(("twin", *where) for where in sampled_twins()),
        *(("mutant", mutant.name) for mutant in sampled_mutants()),
    ]


# -- what comes back ---------------------------------------------------------------------------------------------------


def ask(task: Task) -> tuple[str, dict]:
    """A subject's name and all that the suite says of it, whatever its process was asked before."""
    kind, *where = task
    torch.manual_seed(0)  # stochastic rounding draws
    return " ".join(task), {"adapter": of_adapter, "mutant": of_mutant, "twin": of_twin}[kind](*where)


def of_adapter(name: str) -> dict:
    return reported(Subject(load(name)), power.KINDS)


def of_mutant(name: str) -> dict:
    """Every look, also those behind the first that shows the fault, where ``power`` stops."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    with mutant.change():
        subject = power.subject_for(mutant.layout, mutant.policy, mutant.choices)
        return reported(subject, ("stage",) if mutant.methods else power.KINDS, mutant.methods)


def of_twin(name: str, layout: str, policy: str) -> dict:
    """The walk; the stages too where the twin changes more than its trace."""
    twin = next(twin for twin in power.honest_twins() if twin.name == name)
    formats = {"rounding": "stochastic"} if name == "stochastic rounding" else {}
    with twin.change():
        subject = power.subject_for(layout, policy, formats=formats, kind=partial(power.Thinned, twin.trace))
        return reported(subject, ("trace", "stage") if twin.trace is dict else ("trace",))


def reported(subject, kinds: tuple[str, ...], methods: tuple[str, ...] = ()) -> dict:
    outcomes = power.outcomes(subject, kinds, methods=methods)
    faults = power.faults(subject, outcomes)
    return {
        "first fault": faults[0]["id"] if faults else None,
        "checks": {check["id"]: kept(check) for check in outcomes},
    }


def kept(check: dict) -> dict:
    """What must not change of one check's outcome; what is None is left out."""
    entry = {key: check[key] for key in KEPT} | {"width": check["extra"].get("width")}
    entry["says"] = message_kind(check["message"]) or None
    if check["verdict"] in results.FAULTS:
        entry |= {"blamed": results.blamed_stage(check), "direction": power.direction_of(check)}
    return {key: value for key, value in entry.items() if value is not None}


def message_kind(message: str) -> str:
    """A message without its numbers, which the ratio stands for, and without the lines of a traceback."""
    return NUMERAL.sub("#", FRAMES.sub("", message))


def collect() -> dict:
    """The content of a file. Any number of processes gives the same."""
    subjects = {}
    for name, answers in power.spread(ask, tasks(), PROCESSES):
        subjects[name] = answers
        print(f"{name}: {len(answers['checks'])} checks, first fault {answers['first fault']}", flush=True)
    return {"format": FORMAT, "commit": described(), "machine": machine(), "subjects": subjects}


def machine() -> dict:
    """What else than the suite may change a sum."""
    cpu = torch.backends.cpu.get_cpu_capability()
    host = f"{platform.system()} {platform.machine()} {cpu}"
    return {"platform": host, "numpy": numpy.__version__, "torch": torch.__version__}


# -- files and revisions -----------------------------------------------------------------------------------------------


def store(path: Path, data: dict) -> None:
    write(path, json.dumps(data, indent=0, allow_nan=False) + "\n")


def read(path: Path) -> dict:
    """Raises ValueError with a sentence for a file that holds no verdicts."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of same_verdicts in format {FORMAT}")
    if not data.get("subjects") or not all(subject["checks"] for subject in data["subjects"].values()):
        raise ValueError(f"{path} holds a subject without checks, or none at all: nothing was asked")
    return data


def git(*arguments: str) -> str:
    """Raises ValueError with git's own sentence."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def described() -> str:
    """The commit, and whether the working tree differs from it."""
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def of_revision(revision: str) -> dict:
    """What that revision says, from its file of an earlier run on this machine or collected now."""
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    path = ROOT / FOLDER / f"{commit}.json"
    if not path.exists() or read(path)["machine"] != machine():
        collect_elsewhere(commit, path)
    return read(path)


def collect_elsewhere(commit: str, path: Path) -> None:
    """In a worktree of its own, by that revision's own collector and this interpreter."""
    if not git("ls-tree", commit, COLLECTOR):
        raise ValueError(f"{commit} has no {COLLECTOR}, so it cannot say what its verdicts were; name a later revision")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix="tree-") as tree:
        git("worktree", "add", "--detach", tree, commit)
        try:
            command = [sys.executable, "-m", "draftconf.conformance.evidence.same_verdicts", "store", str(path)]
            subprocess.run(command, cwd=tree, check=True)
        except subprocess.CalledProcessError as error:
            raise ValueError(f"the collector of {commit} ended with exit status {error.returncode}") from error
        finally:
            git("worktree", "remove", "--force", tree)


# -- what changed ------------------------------------------------------------------------------------------------------


def compare(old: dict, new: dict) -> list[str]:
    """A line for each subject and check that differs. Raises ValueError where that would say nothing of the suite."""
    if old["machine"] != new["machine"]:
        raise ValueError(
            f"the two files cannot be compared: one was made on {in_words(old['machine'])}, the other on "
            f"{in_words(new['machine'])}, and sums may differ between them"
        )
    return [line for name in both(old["subjects"], new["subjects"]) for line in differences(name, old, new)]


def differences(name: str, old: dict, new: dict) -> Iterator[str]:
    """Those of one subject."""
    was, now = old["subjects"].get(name), new["subjects"].get(name)
    if was is None or now is None:
        yield f"{name}: {'added' if was is None else 'removed'}"
        return
    if was["first fault"] != now["first fault"]:
        yield f"{name}: first fault {was['first fault']} before, {now['first fault']} now"
    for check in both(was["checks"], now["checks"]):
        before, after = was["checks"].get(check), now["checks"].get(check)
        if before is None or after is None:
            yield f"{name}: {check}: {'added' if before is None else 'removed'}, {in_words(before or after)}"
        elif changed := [key for key in both(before, after) if not same(key, before.get(key), after.get(key))]:
            parts = (in_words({key: entry.get(key) for key in changed}) for entry in (before, after))
            yield "{}: {}: {} before; {} now".format(name, check, *parts)


def both(a: dict, b: dict) -> list[str]:
    """Keys of either, in order."""
    return list(dict.fromkeys((*a, *b)))


def same(key: str, was, now) -> bool:
    if key not in NUMBERS or was is None or now is None:
        return was == now
    was, now = float(was), float(now)  # inf and nan are strings in JSON
    return isclose(was, now, rel_tol=TOLERANCE, abs_tol=0) or (was != was and now != now)


def in_words(entry: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in entry.items())


# -- the command -------------------------------------------------------------------------------------------------------


def judge(old: dict, new: dict) -> int:
    """Print what changed; the exit status."""
    lines = compare(old, new)
    count = sum(len(subject["checks"]) for subject in new["subjects"].values())
    print(f"{old['commit']} against {new['commit']}: {len(new['subjects'])} subjects, {count} checks")
    if not lines:
        print("Every verdict, blame and ratio is the same.")
        return 0
    print(f"Differences: {len(lines)}" + (f", the first {SHOWN}:" if len(lines) > SHOWN else ":"))
    print("\n".join(lines[:SHOWN]))
    return 1


def collect_here() -> dict:
    """What the working tree says; kept beside the files of revisions."""
    data = collect()
    store(ROOT / FOLDER / f"{data['commit']}.json", data)
    return data


def run(options: argparse.Namespace) -> int:
    if options.command == "store":
        store(options.file, collect())
        return 0
    if options.command == "since":
        return judge(of_revision(options.revision), collect_here())
    old = read(options.old)
    return judge(old, read(options.new) if options.new else collect_here())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("since").add_argument("revision")
    commands.add_parser("store").add_argument("file", type=Path)
    two = commands.add_parser("compare")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path, nargs="?")
    try:
        return run(parser.parse_args())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
