"""Measure sections, and make reports/BENCHMARKS.md of all that has been measured.

python -m benchmarks.run [SECTION ...] [--runs 7]     (in .venv-peers, for the peers' rows)
"""

import argparse
import os
import subprocess
import sys
import warnings

from benchmarks import experts, longest, loss, mx, report, unroll

WARM = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736"}
SECTIONS = {
    "loss": (loss.measure, {}),
    "loss, warm heap": (loss.measure_short, WARM),  # freed pages are kept, as a GPU's caching allocator does
    "mx": (mx.measure, {}),
    "experts": (experts.measure, {}),
    "unroll": (unroll.measure, {}),
    "precision": (unroll.measure_precision, {}),
    "recompute": (unroll.measure_recompute, {}),
    "growth": (unroll.measure_growth, {}),
    "longest": (longest.measure, {}),
}


def measure(section: str, runs: int) -> None:
    cases = []
    for case in SECTIONS[section][0](runs):
        print(report.table(case), flush=True)
        cases.append(case)
        report.save(section, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", default=[], help=", ".join(SECTIONS))
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    sections = options.section or list(SECTIONS)
    for section in sections:
        needed = SECTIONS[section][1]
        if len(sections) == 1 and needed.items() <= os.environ.items():
            measure(section, options.runs)
        else:  # a process for each: it reads its environment when it starts, and gives its memory back when it ends
            command = [sys.executable, "-m", "benchmarks.run", section, "--runs", str(options.runs)]
            subprocess.run(command, env=os.environ | needed, check=True)


if __name__ == "__main__":
    main()
