"""What a method of an adapter returns, read safely; and the ways in which a call can end without an answer."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

EXTENSION_TYPES = ("bfloat16", "float8_", "float6_", "float4_")  # NumPy dtypes of ml_dtypes, exact in float32


class NotOffered(Exception):
    """The adapter does not offer this method, or not for this case."""


class AdapterError(Exception):
    """The adapter raised, changed its inputs, or returned what cannot be read. ``details`` holds traceback lines."""

    verdict = "error"

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class AdapterCrash(AdapterError):
    """The process of the adapter ended during the call."""

    verdict = "crash"


class AdapterTimeout(AdapterError):
    """No answer in the time given; the process has been ended."""

    verdict = "timeout"


@dataclass
class Result:
    """What a method returns. ``grads`` go by input name, ``decisions`` and ``trace`` by the keys of the protocol."""

    outputs: Mapping
    grads: Mapping = field(default_factory=dict)
    decisions: Mapping = field(default_factory=dict)
    trace: Mapping = field(default_factory=dict)


def _first_line(error: BaseException, limit: int = 300) -> str:
    return (str(error).strip().splitlines() or [""])[0][:limit]


def frames(error: BaseException, limit: int = 4) -> str:
    """The last traceback lines, by file name only, so that they read the same on every machine."""
    frames = traceback.extract_tb(error.__traceback__)[1:][-limit:]
    return "\n".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in frames)


def read_result(returned, method: str) -> Result:
    """Whatever a method returned, as a Result of NumPy arrays that nobody else holds."""
    if all(hasattr(returned, part) for part in ("outputs", "grads")):
        parts = [getattr(returned, part, {}) for part in ("outputs", "grads", "decisions", "trace")]
    elif isinstance(returned, Mapping):
        parts = [returned]
    elif isinstance(returned, tuple) and 1 <= len(returned) <= 4:
        parts = list(returned)
    else:
        kind = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise AdapterError(f"{method} returned {kind}; wanted a Result, a mapping of outputs, or a tuple of up to four")
    names = ("outputs", "grads", "decisions", "trace")
    return Result(**{name: _arrays(part, name, method) for name, part in zip(names, parts, strict=False)})


def _arrays(part, kind: str, method: str) -> dict:
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise AdapterError(f"{method} returned {kind} as {type(part).__name__}; wanted a mapping from names to arrays")
    if not all(isinstance(name, str) for name in part):
        raise AdapterError(f"{method} returned {kind} with a key that is not a string")
    arrays = {name: _array(value, f"{method}: {kind}[{name!r}]") for name, value in part.items()}
    return arrays if kind == "grads" else {name: value for name, value in arrays.items() if value is not None}


def _array(value, where: str) -> np.ndarray | None:
    if value is None:
        return None
    try:
        array = np.array(_numpy(value))
    except Exception as error:
        raise AdapterError(f"{where} is not an array: {type(error).__name__}: {_first_line(error)}") from error
    if array.dtype.name.startswith(EXTENSION_TYPES):
        array = array.astype(np.float32)
    if array.dtype.kind not in "fiub":
        raise AdapterError(f"{where} has dtype {array.dtype}; wanted real floats, integers or booleans")
    return array


def _numpy(value):
    """Unwrap a PyTorch tensor without importing torch; NumPy reads the other array types itself."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    try:
        return value.numpy()
    except TypeError:  # NumPy has no bfloat16; float32 holds every such value exactly
        return value.float().numpy()
