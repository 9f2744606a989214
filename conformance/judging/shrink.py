"""The smallest input that still shows a fault: drop what it does not need, then round what is left."""

from collections.abc import Callable

import numpy as np

TRIALS = 400


def minimize(items: list, fails: Callable[[list], bool]) -> list:
    """A sublist from which no single item can be dropped (delta debugging, halves first). ``fails`` of it is true."""
    trials, size = 0, max(len(items) // 2, 1)
    while size >= 1 and trials < TRIALS:
        start, dropped = 0, False
        while start < len(items) and trials < TRIALS:
            trial = items[:start] + items[start + size :]
            trials += 1
            if trial and fails(trial):
                items, dropped = trial, True
            else:
                start += size
        size = size if dropped and size == 1 else size // 2
    return items


def rounded(x: np.ndarray, fails: Callable[[np.ndarray], bool]) -> np.ndarray:
    """``x`` on the coarsest grid of 100, 10, 1, 1/4 on which it still fails; x itself if on none."""
    for step in (100.0, 10.0, 1.0, 0.25):
        trial = np.rint(x / step) * step
        if fails(trial):
            return trial
    return x


def shown(x: np.ndarray) -> str:
    """Integers and quarters in decimal, everything else in hexadecimal, exactly."""
    return "[" + ", ".join(f"{v:g}" if v * 4 == np.rint(v * 4) and abs(v) < 1e6 else v.hex() for v in x.tolist()) + "]"
