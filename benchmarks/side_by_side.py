"""Measuring beside one another: interleaved times, peak memory of one call, bytes kept for the backward pass."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

PAGE = 4096


def interleaved(functions: dict[str, Callable], runs: int) -> dict[str, list[float]]:
    """Seconds of every function, ``runs`` times in turn after one unmeasured round, so that load hits all alike."""
    for function in functions.values():
        function()
    return timed_in_turn(functions, runs)


def timed_in_turn(functions: dict[str, Callable], runs: int) -> dict[str, list[float]]:
    """The same without the unmeasured round."""
    times = {name: [] for name in functions}
    for _ in range(runs):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def peak_extra(function: Callable, interval: float = 0.002) -> int:
    """Peak resident bytes of one call above those at its start, freed memory returned to the system first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, done = resident(), 0, threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(interval):
            peak = max(peak, resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        function()
    finally:
        done.set()
        sampler.join()
    return max(peak, resident()) - before


@contextmanager
def kept_for_backward(own: list[torch.Tensor]):
    """Yields a list to which the bytes of every storage that autograd keeps are added, parameters ``own`` left out."""
    seen, sizes = {x.untyped_storage().data_ptr() for x in own}, []

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield sizes
