"""The most positions of one row that a seven-step training step fits in 16 GiB, ours and NeMo AutoModel's.

Each length runs in a process of its own whose data (heap and anonymous memory) is limited by the system to 16 GiB above
what the imports take; the model's weights and the batch with its target logits count too.
"""

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

from benchmarks.report import Case
from benchmarks.side_by_side import peak_extra

LIMIT = 16 * 2**30
LENGTHS = {
    "nemo_automodel": (1024, 1280, 1536, 2048),
    "fast": (2048, 4096, 8192),
}


def data_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def attempt(which: str, slots: int) -> tuple[float, int] | None:
    """Seconds and peak bytes of one step in a process of its own; None where the memory did not suffice."""
    command = [sys.executable, "-m", "benchmarks.longest", which, str(slots)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return tuple(json.loads(done.stdout.splitlines()[-1]))
    if "MemoryError" in done.stderr or "can't allocate memory" in done.stderr or "bad_alloc" in done.stderr:
        return None
    raise RuntimeError(f"{which} at {slots} positions failed, not for memory:\n{done.stderr[-2000:]}")


def measure(runs: int) -> Iterator[Case]:
    """One run a length: it is the memory that is asked for."""
    times, extra, longest = {}, {}, {}
    for which, lengths in LENGTHS.items():
        for slots in lengths:
            found = attempt(which, slots)
            if found is None:
                break
            name = f"{which}, T = {slots}"
            longest[which] = f"{slots} (the longest tried)" if slots == lengths[-1] else slots
            times[name], extra[name] = [found[0]], found[1]
    note = f"Longest that fits: {', '.join(f'{which} {slots}' for which, slots in longest.items())}. "
    yield Case(
        "Layout eagle3: positions in 16 GiB", next(iter(times)), times, extra,
        note=note + "Weights and batch count. Lengths tried: "
        + "; ".join(f"{which} {', '.join(map(str, lengths))}" for which, lengths in LENGTHS.items())
        + ", each up to the first that fails.",
    )  # fmt: skip


def main(which: str, slots: int) -> None:
    warnings.filterwarnings("ignore")
    from benchmarks import unroll

    if which == "nemo_automodel":
        import nemo_automodel.components.speculative.eagle.core  # noqa: F401  before the limit
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT + data_bytes(),) * 2)
    start = data_bytes()

    def step() -> None:
        subject = unroll.Ours(unroll.EAGLE3, slots=slots)
        subject = subject if which == "fast" else unroll.Theirs(subject)
        begin = time.perf_counter()
        subject.run()
        seconds.append(time.perf_counter() - begin)

    seconds = []
    peak = peak_extra(step)
    print(json.dumps([seconds[0], max(peak, data_bytes() - start)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
