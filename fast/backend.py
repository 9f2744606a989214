"""Which code computes the loss and the MX formats: C++ on the CPU, Triton on CUDA, or plain PyTorch anywhere."""

import importlib.util
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from .kernels import build

BACKENDS = ("auto", "native", "triton", "eager")
_chosen = "auto"


@contextmanager
def using(name: str):
    """Inside, ``name`` is the backend of every call, in this process, that is not given one."""
    global _chosen
    before, _chosen = _chosen, _known(name)
    try:
        yield
    finally:
        _chosen = before


def choose(name: str | None, *tensors: Tensor) -> str:
    """The backend for these tensors: "native", "triton" or "eager".

    ``name``: "auto" takes native on the CPU where a compiler is found and triton on CUDA where it is installed, else
    eager; None takes what ``using`` says, auto at first. Tensors of other types than float32 and bfloat16 are for
    eager, whatever was chosen. Raises ValueError for another name, RuntimeError for a backend that cannot run here.
    """
    name = _known(_chosen if name is None else name)
    if name == "eager" or any(x.dtype not in (torch.float32, torch.bfloat16) for x in tensors):
        return "eager"
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    if name == "auto":
        usable, name = (_native(), "native") if on_cpu else (_triton(), "triton")
        return name if usable else "eager"
    if name == "native" and not (on_cpu and _native()):
        raise RuntimeError(f"backend 'native': {build.problem() or 'the tensors are not on the CPU'}")
    if name == "triton" and not _triton():
        raise RuntimeError("backend 'triton': triton is not installed")
    return name


def _known(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; wanted one of {', '.join(BACKENDS)}")
    return name


@torch.compiler.assume_constant_result
def _native() -> bool:
    return build.library() is not None


@cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None
