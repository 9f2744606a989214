"""Adapters that misbehave in ``fusion`` and are right elsewhere, one class for each way; for test_isolation.py."""

import ctypes
import os
import random
import signal
import sys
import threading
import time
import warnings

import numpy as np

from draftconf.conformance.adapters.reference import Reference
from draftconf.conformance.protocol.description import METHODS

OFFERED = ("fusion", "situ_glu", "head", "lk_loss")


class Clean(Reference):
    def describe(self) -> dict:
        return super().describe() | {"name": type(self).__name__, "layouts": ["mtp"]}


for absent in set(METHODS) - set(OFFERED):
    setattr(Clean, absent, None)


def misbehaving(behave, base=Clean):
    """``behave(inputs, honest)`` in place of ``fusion``; ``honest()`` computes what is right."""

    class Hostile(base):
        def fusion(self, inputs, *, cotangents=None, forced=None):
            return behave(inputs, lambda: base.fusion(self, inputs, cotangents=cotangents, forced=forced))

    return Hostile


def changing(change):
    """An output that ``change`` has been at."""

    def behave(inputs, honest):
        outputs, grads = honest()[:2]
        return {name: change(y) for name, y in outputs.items()}, grads

    return misbehaving(behave)


def doing(act, base=Clean):
    """``act()`` first, then what is right."""
    return misbehaving(lambda inputs, honest: (act(), honest())[1], base)


# -- the process ends, or never answers ------------------------------------------------------------------------------


def endless():
    while True:
        pass


def fork_and_leave():
    """The child keeps the connection open for as long as it sleeps."""
    if os.fork() == 0:
        time.sleep(300)
    os._exit(3)


SegmentationFault = doing(lambda: ctypes.string_at(0))
Abort = doing(os.abort)
Killed = doing(lambda: os.kill(os.getpid(), signal.SIGKILL))
ExitZero = doing(lambda: os._exit(0))
ForkAndLeave = doing(fork_and_leave)
ClosesEverything = doing(lambda: os.closerange(3, 256))
Endless = doing(endless)
Sleeps = doing(lambda: time.sleep(300))

# -- it raises, or returns what is wrong -----------------------------------------------------------------------------


def raising(error):
    def act():
        raise error

    return doing(act)


def overwrite(inputs):
    ctypes.memset(inputs["low"].ctypes.data, 1, inputs["low"].nbytes)


Raises = raising(RuntimeError("no kernel"))
ExitsPython = raising(SystemExit(0))
Interrupts = raising(KeyboardInterrupt())
Allocates = doing(lambda: np.ones(20 * 2**30, np.uint8))
NoCuda = doing(lambda: __import__("torch").zeros(1, device="cuda"))
WrongKey = misbehaving(lambda inputs, honest: {"features": honest()[0]["feature"]})
WrongType = changing(lambda y: y.astype(np.int32))
WrongShape = changing(lambda y: np.swapaxes(y, 0, 1))
NotANumber = changing(lambda y: y * np.nan)
Complex = changing(lambda y: y.astype(complex))
Objects = changing(lambda y: y.astype(object))
Random = changing(lambda y: y * (1 + 1e-3 * np.random.default_rng().random(y.shape)))
Aliases = misbehaving(lambda inputs, honest: ({"feature": inputs["low"]}, {}))
Overwrites = misbehaving(lambda inputs, honest: (honest(), overwrite(inputs))[0])

# -- harmless --------------------------------------------------------------------------------------------------------


def flood():
    for _ in range(100):
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)
        os.write(1, b"\xff" * 100_000)
    os.system("echo from a child; echo and its errors >&2")


def fork():
    """Both come back, and the child has nothing to answer."""
    os.fork()


def fork_and_stay():
    if os.fork() == 0:
        time.sleep(300)


def start_threads():
    for daemon in (True, False):
        threading.Thread(target=time.sleep, args=(300,), daemon=daemon).start()


Floods = doing(flood)
Warns = doing(lambda: warnings.warn("old", stacklevel=1))
Strided = changing(lambda y: np.asfortranarray(y)[..., ::-1][..., ::-1])
BigEndian = changing(lambda y: y.astype(">f8"))
Forks = doing(fork)
ForksAndStays = doing(fork_and_stay)
StartsThreads = doing(start_threads)
SetsErrors = doing(lambda: np.seterr(all="raise"))

# -- it leaves the process changed -----------------------------------------------------------------------------------


def patch_numpy():
    np.exp = np.tanh = np.zeros_like
    np.matmul = np.einsum = lambda *args, **kwargs: np.zeros(1)


def patch_numpy_inside():
    import numpy.linalg

    numpy.linalg.norm = sum.__call__
    np._core.numeric.ones_like = np.zeros_like


def flush_subnormals():
    import torch

    torch.set_flush_denormal(True)


def set_alarm():
    signal.setitimer(signal.ITIMER_REAL, 1.0)


PatchesNumpy = doing(patch_numpy)
PatchesNumpyInside = doing(patch_numpy_inside)
PatchesBuiltins = doing(lambda: __import__("builtins").__dict__.update(max=min))
FlushesSubnormals = doing(flush_subnormals)
ChangesFolder = doing(lambda: os.chdir("/"))
ChangesEnvironment = doing(lambda: os.environ.update(PATH="/nowhere"))
SetsAlarm = doing(set_alarm)


class KeepsInputs(Clean):
    """Keeps what it was handed, and writes there later."""

    def fusion(self, inputs, *, cotangents=None, forced=None):
        self.kept = inputs
        return super().fusion(inputs, cotangents=cotangents, forced=forced)

    def situ_glu(self, inputs, *, cotangents=None, forced=None):
        overwrite(self.kept)
        return super().situ_glu(inputs, cotangents=cotangents, forced=forced)


class Draws(Clean):
    """What it draws does not depend on what ``fusion`` did to the generators."""

    def fusion(self, inputs, *, cotangents=None, forced=None):
        np.random.seed(os.getpid())
        random.seed(os.getpid())
        np.random.random(7)
        return super().fusion(inputs, cotangents=cotangents, forced=forced)

    def situ_glu(self, inputs, *, cotangents=None, forced=None):
        return {"y": np.array([np.random.random(), random.random()])}


# -- start and stop --------------------------------------------------------------------------------------------------


class WrongOnceThenEndless(Clean):
    """Wrong on what the check hands over, and never done with the smaller inputs that are tried afterwards."""

    called = 0

    def lk_loss(self, inputs, *, cotangents=None, forced=None):
        type(self).called += 1
        if self.called > 1:
            endless()
        outputs, *rest = super().lk_loss(inputs, cotangents=cotangents, forced=forced)
        return {"loss": outputs["loss"] + 1}, *rest

    def mxfp4(self, inputs, *, cotangents=None, forced=None):
        if np.shape(inputs["x"])[0] == 1:
            os._exit(0)
        return {"scales": np.zeros((len(inputs["x"]), 1), np.uint8), "codes": np.zeros(np.shape(inputs["x"]), np.uint8)}


class StopRaises(Clean):
    def stop(self):
        raise RuntimeError("still busy")


class StopCrashes(Clean):
    def stop(self):
        os._exit(0)


class StartCrashes(Clean):
    def start(self, config, choices):
        os._exit(7)


class StartChanges(Clean):
    """May do so: its own stop(), or else the suite, ends it."""

    def start(self, config, choices):
        super().start(config, choices)
        np.seterr(over="ignore")
        os.environ["PATH"] = "/nowhere"


# -- PyTorch ---------------------------------------------------------------------------------------------------------


kept = []


def torch_adapters() -> dict:
    import torch

    from draftconf.conformance.adapters.fast import POLICIES, FastAdapter

    class TorchClean(FastAdapter):
        layouts = ["mtp"]
        policies = {"float32": POLICIES["float32"]}

    for absent in set(METHODS) - set(OFFERED):
        setattr(TorchClean, absent, None)

    def enter_inference():
        kept.append(torch.inference_mode())  # it ends with the object
        kept[-1].__enter__()

    def matmul(*args):
        raise RuntimeError("patched")

    acts = {
        "TorchGradOff": lambda: torch.set_grad_enabled(False),
        "TorchInference": enter_inference,
        "TorchDtype": lambda: torch.set_default_dtype(torch.float64),
        "TorchPatched": lambda: setattr(torch.Tensor, "__matmul__", matmul) or setattr(torch, "einsum", matmul),
        "TorchSeeds": lambda: torch.manual_seed(os.getpid()),
    }
    return {"TorchClean": TorchClean, **{name: doing(act, TorchClean) for name, act in acts.items()}}


def __getattr__(name: str):
    if name.startswith("Torch"):
        globals().update(torch_adapters())
        return globals()[name]
    raise AttributeError(name)
