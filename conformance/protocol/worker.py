"""The process that an isolated adapter runs in: loads it, answers calls, and says what a call left changed.

Needs NumPy and what the adapter imports; neither pytest nor execnet has to be there, nor the suite: isolation.py lends
it the packages. A message is a mapping of plain values; the arrays that belong to it follow as raw bytes with their
dtype and shape. Nothing is unpickled on either side.
"""

import builtins
import faulthandler
import gc
import os
import random
import resource
import signal
import sys

import numpy as np

from draftconf.reference.config import Choices, DraftConfig

from .description import METHODS
from .environment import environment, torch_version
from .loading import load
from .plain import plain
from .result import AdapterError, NotOffered, frames
from .subject import Subject

GROUPS = ("inputs", "cotangents", "forced")
PARTS = ("outputs", "grads", "decisions", "trace")
PIECE = 1 << 26  # bytes in one message
NOT_WATCHED = ("numpy.testing", "numpy.f2py", "numpy.ma", "numpy.typing")

# -- messages --------------------------------------------------------------------------------------------------------


def send(channel, message: dict, groups: dict) -> None:
    """``groups`` maps names to mappings of arrays and plain values, or to None."""
    arrays = []
    described = {name: None if group is None else _described(group, arrays) for name, group in groups.items()}
    channel.send(message | {"groups": described})
    for array in arrays:
        data = array.tobytes()
        for start in range(0, len(data), PIECE):
            channel.send(data[start : start + PIECE])


def _described(group, arrays: list) -> dict:
    described = {}
    for name, value in group.items():
        if isinstance(value, np.ndarray):
            arrays.append(value)
            described[name] = {"dtype": value.dtype.str, "shape": list(value.shape)}
        else:
            described[name] = value.item() if isinstance(value, np.generic) else value
    return described


def receive(next_item) -> tuple[dict, dict]:
    """What ``send`` sent. ``next_item()`` gives the next item of the channel."""
    message = next_item()
    described = message.pop("groups")
    return message, {
        name: None if group is None else {key: _restored(value, next_item) for key, value in group.items()}
        for name, group in described.items()
    }


def _restored(value, next_item):
    if not isinstance(value, dict):
        return value
    dtype, shape, data = np.dtype(value["dtype"]), tuple(value["shape"]), bytearray()
    if dtype.kind not in "fiub":
        raise ValueError(f"an array of dtype {dtype}")
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    while len(data) < size:
        data += next_item()
    return np.frombuffer(data, dtype).reshape(shape)


# -- what one call could leave behind for the next -------------------------------------------------------------------


def surroundings() -> dict:
    """The state of the process that results could depend on. Values are compared by ``is`` or ``==``."""
    state = {
        "the working directory": os.getcwd(),
        "the floating-point modes": _rounding(),
        "a timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "garbage collection": gc.isenabled(),
        "the recursion limit": sys.getrecursionlimit(),
        "numpy.geterr": np.geterr(),
        "numpy.getbufsize": np.getbufsize(),
    }
    state |= {f"the environment variable {name}": value for name, value in os.environ.items()}
    state |= {f"builtins.{name}": value for name, value in vars(builtins).items() if callable(value)}
    for module in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
        if sys.modules[module] is not None and not module.startswith(NOT_WATCHED):
            public = vars(sys.modules[module]).items()
            state |= {f"{module}.{name}": value for name, value in public if name[0] != "_"}
    return state | _torch_state(sys.modules.get("torch"))


def _rounding() -> tuple:
    """Whether subnormal numbers are flushed and which way is rounded, seen in arithmetic done now."""
    with np.errstate(all="ignore"):
        tiny, one, three = np.array([1e-40], np.float32), np.array([1.0]), np.array([3.0])
        return float((tiny * np.float32(0.5))[0]), float((one / three)[0]), float((-one / three)[0])


def _torch_state(torch) -> dict:
    if torch is None or not hasattr(torch, "Tensor"):
        return {}
    getters = (
        "is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_default_device", "get_num_threads",
        "are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "is_anomaly_enabled",
        "is_autocast_enabled",
    )  # fmt: skip
    state = {f"torch.{name}()": str(getattr(torch, name)()) for name in getters if hasattr(torch, name)}
    for owner, members in (("torch", torch), ("torch.nn.functional", torch.nn.functional), ("Tensor", torch.Tensor)):
        public = vars(members).items()
        state |= {f"{owner}.{name}": value for name, value in public if name[0] != "_" and callable(value)}
    return state


def changed(before: dict, after: dict) -> list[str]:
    """Names of what was there before and is not the same now. What is new, such as a late import, is no change."""
    return [name for name, value in before.items() if not _same(value, after.get(name))]


def _same(a, b) -> bool:
    return a is b or (isinstance(a, str | int | float | tuple | dict) and type(a) is type(b) and a == b)


def seed() -> None:
    """The same random numbers for every call, whatever was called before."""
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(0)


# -- serving ---------------------------------------------------------------------------------------------------------


def serve(channel) -> None:
    """Until the channel closes. A child that the adapter forked ends where it comes back to here."""
    process, setup = os.getpid(), channel.receive()
    os.dup2(2, 1)  # what it prints goes the way of its error output: kept to the last lines, never shown in between
    faulthandler.enable()
    _limit(setup["memory"])
    sys.path += [entry for entry in setup["path"] if entry not in sys.path]
    try:
        subject = Subject(load(setup["adapter"]))
        offers = [method for method in METHODS if subject.offers(method)]
    except BaseException as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        send(channel, {"status": "refused", "message": said}, {})
        return
    about = {"description": plain(subject.description.to_dict()), "offers": offers, "versions": environment()}
    send(channel, {"status": "loaded", **about}, {})
    loaded = surroundings()
    while True:
        try:
            request, groups = receive(channel.receive)
        except EOFError:
            return
        try:
            reply, parts = _answer(subject, request, groups, loaded)
        finally:
            if os.getpid() != process:
                os._exit(0)
        send(channel, reply | {"torch": torch_version()}, parts)


def _limit(gib: float) -> None:
    if gib:
        limit = int(gib * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _answer(subject: Subject, request: dict, groups: dict, loaded: dict) -> tuple[dict, dict]:
    """The reply and its arrays. ``changed`` tells what this request left changed."""
    before, parts = loaded, {}
    try:
        if request["do"] == "stop":
            subject.stop()
        else:
            seed()
            place = DraftConfig(**request["config"]), Choices(**request["choices"]), request["policy"]
            subject._start(*place)
            before = surroundings()
            seed()
            config, choices, policy = place
            result = subject.call(request["method"], config=config, choices=choices, policy=policy, **groups)
            parts = {name: getattr(result, name) for name in PARTS}
        reply = {"status": "done"}
    except NotOffered as error:
        reply = {"status": "not offered", "message": str(error)}
    except AdapterError as error:
        reply = {"status": "error", "message": str(error), "details": error.details}
    except BaseException as error:  # of the suite's own code here, or an interrupt that the adapter raised
        text = f"{request.get('method', 'stop')} raised {type(error).__name__}: {error}"
        reply = {"status": "error", "message": text, "details": frames(error)}
    return reply | {"changed": changed(before, surroundings())}, parts
