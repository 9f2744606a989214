"""What the benchmarks measured, section by section (reports/data/benchmarks.json), and BENCHMARKS.md made from that."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from draftconf.conformance.report import files
from draftconf.conformance.report.fingerprint import subject_hash
from draftconf.fast.kernels import build

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "reports" / "data" / "benchmarks.json", ROOT / "reports" / "BENCHMARKS.md"
ORDER = ("loss", "loss, warm heap", "mx", "experts", "unroll", "precision", "recompute", "growth", "longest", "CUDA")
PACKAGES = (
    "torch", "numpy", "speculators", "nemo-automodel", "specforge", "torchao", "nvidia-modelopt", "compressed-tensors",
    "triton", "liger-kernel",
)  # fmt: skip


@dataclass
class Target:
    """``row`` takes at most ``limit`` times as long as ``against`` (or, ``at_least``, at least so many times)."""

    row: str
    against: str
    limit: float
    at_least: bool = False

    def reached(self, times: dict[str, list[float]]) -> tuple[bool, str]:
        middle, least, most = ratios(times, self.row, self.against)
        good = middle >= self.limit if self.at_least else middle <= self.limit
        sign = ">=" if self.at_least else "<="
        text = f"{self.row} / {self.against} {sign} {self.limit:g}: {middle:.2f} ({least:.2f} to {most:.2f})"
        return good, text


@dataclass
class MemoryTarget:
    """``row`` takes at most ``limit`` bytes, or so many times the bytes of ``against``."""

    row: str
    limit: float
    against: str = ""

    def reached(self, extra: dict[str, int]) -> tuple[bool, str]:
        taken = extra[self.row]
        if self.against:
            share = taken / extra[self.against]
            return share <= self.limit, f"{self.row} / {self.against}, extra memory <= {self.limit:g}: {share:.3f}"
        return taken <= self.limit, f"{self.row}, extra memory <= {size(self.limit)}: {size(taken)}"


@dataclass
class Case:
    """Functions timed in turn: seconds of each run by name. ``bound`` is what the others are held against."""

    title: str
    bound: str
    times: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)  # bytes
    kept: dict[str, int] = field(default_factory=dict)  # bytes kept for a backward pass
    targets: list[Target] = field(default_factory=list)
    memory_targets: list[MemoryTarget] = field(default_factory=list)
    note: str = ""

    @classmethod
    def load(cls, data: dict) -> "Case":
        targets = [Target(**t) for t in data.pop("targets")]
        memory = [MemoryTarget(**t) for t in data.pop("memory_targets")]
        return cls(**data, targets=targets, memory_targets=memory)


def ratios(times: dict[str, list[float]], a: str, b: str) -> tuple[float, float, float]:
    """Median, least and largest of a / b, run by run."""
    each = [x / y for x, y in zip(times[a], times[b], strict=True)]
    return statistics.median(each), min(each), max(each)


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def environment() -> dict:
    """Machine, threads and versions, without anything that identifies the machine itself."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "subject": subject_hash("fast", ""),
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "compiler": compiler(),
        "versions": versions,
        "heap": "warm" if "mmap_max=0" in os.environ.get("GLIBC_TUNABLES", "") else "the C library's default",
    }


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    facts = dict(line.split("\t: ", 1) if "\t: " in line else (line, "") for line in lines)
    facts = {key.strip(): value for key, value in facts.items()}
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())}, {os.cpu_count()} processors, {' '.join(flags)}"


def compiler() -> str:
    if build.library() is None:
        return "none"
    return subprocess.run([build.compiler(), "--version"], capture_output=True, text=True).stdout.splitlines()[0]


def save(section: str, cases: list[Case]) -> None:
    """Put a section's cases into the data, with the environment that they ran in, and make the page anew."""
    everything = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    everything[section] = {"environment": environment(), "cases": [asdict(case) for case in cases]}
    files.write(DATA, files.as_json(everything))
    files.write(PAGE, page(everything))


HEAD = """# Benchmarks

Made by `make bench`, which measures every row of a table in turn, run after run, in one process, beside the thing that
bounds it: a copy of the same data, or the bare matrix products. Read the ratios, not the milliseconds: the machine is
virtual, and what its neighbours do hits all rows of a table alike, but not every run. Each ratio is the median over the
runs of the ratio within one run; in brackets its least and its largest. The functions are the ones that the conformance
suite certifies. Extra memory is the peak of resident memory during one call, by a sampler, above that at its start;
what is kept for a backward pass is counted by hooks on saved tensors. Raw numbers: `reports/data/benchmarks.json`. A
section names the content of `fast` that it was measured on; those measured before 0.2.0 did not record it.
"""


def page(everything: dict) -> str:
    """The whole page, from the data of all sections."""
    sections = {name: [Case.load(dict(c)) for c in everything[name]["cases"]] for name in ORDER if name in everything}
    parts = [HEAD, overview(sections)]
    for section, cases in sections.items():
        parts.append(f"\n## {section}\n\n{about(everything[section]['environment'])}\n")
        parts += [table(case) for case in cases]
    if "CUDA" not in everything:
        parts.append("\n## CUDA\n\nNot measured: no GPU was there. `make bench-gpu` measures it in one call.\n")
    return "".join(parts)


def overview(sections: dict[str, list[Case]]) -> str:
    """Every target, and whether it is reached."""
    rows = [(case.title, *verdict) for cases in sections.values() for case in cases for verdict in verdicts(case)]
    missed = sum(not good for _, good, _ in rows)
    lines = [
        "",
        "## Targets",
        "",
        f"{len(rows) - missed} of {len(rows)} are reached. In brackets the range of the runs.",
    ]
    lines += ["", "| benchmark | target: found | |", "|---|---|---|"]
    lines += [f"| {title} | {text} | {'reached' if good else '**not reached**'} |" for title, good, text in rows]
    return "\n".join(lines) + "\n"


def verdicts(case: Case) -> list[tuple[bool, str]]:
    in_time = [target.reached(case.times) for target in case.targets]
    return in_time + [target.reached(case.extra) for target in case.memory_targets]


def about(facts: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    judged = f"fast {facts['subject']}; " if facts.get("subject") else ""
    return (
        f"{judged}{facts['when']}; {facts['machine']}; "
        f"{facts['threads']} threads, wall time, load {facts['load']} at the end; "
        f"Python {facts['python']}, {versions}; {facts['compiler']}; heap: {facts['heap']}."
    )


def table(case: Case) -> str:
    lines = [f"\n### {case.title}\n"]
    if case.note:
        lines.append(f"{case.note}\n")
    columns = ["", "ms, median (range)", f"/ {case.bound}"]
    columns += ["extra memory"] if case.extra else []
    columns += ["kept for backward"] if case.kept else []
    lines += [" | ".join(["", *columns, ""]).strip(), "|" + "---|" * len(columns)]
    for name, times in case.times.items():
        milliseconds = sorted(1e3 * t for t in times)
        middle, least, most = ratios(case.times, name, case.bound)
        cells = [name, f"{statistics.median(milliseconds):.4g} ({milliseconds[0]:.4g} to {milliseconds[-1]:.4g})"]
        cells += ["1" if name == case.bound else f"{middle:.2f} ({least:.2f} to {most:.2f})"]
        cells += [size(case.extra[name]) if name in case.extra else ""] if case.extra else []
        cells += [size(case.kept[name]) if name in case.kept else ""] if case.kept else []
        lines.append("| " + " | ".join(cells) + " |")
    targets = verdicts(case)
    lines += [""] * bool(targets)
    lines += [f"- {'reached' if good else '**not reached**'}: {text}" for good, text in targets]
    return "\n".join(lines) + "\n"
