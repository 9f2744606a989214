"""An adapter in a process of its own: what it breaks, it breaks there.

One process serves all calls. It is replaced when a call ends it or runs out of time, and also when a call leaves the
process changed (a default dtype, a patched NumPy, gradients switched off), so that no method is judged in what another
left behind. A call that failed is remembered: every check that rests on it gets the same verdict, without another try.
"""

import hashlib
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import execnet

import draftconf

from .description import Description
from .limits import Limits
from .result import AdapterCrash, AdapterError, AdapterTimeout, NotOffered, Result
from .worker import GROUPS, receive, send

LOADING = 600.0  # seconds; some packages import for minutes
TAIL = 1 << 14  # bytes of its output that are kept
FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')

#: Lends the process this package of the suite's directory, and nothing else that lies there.
BOOTSTRAP = """
import importlib.machinery, os, sys
os.setsid()
channel.send(os.getpid())
root = channel.receive()

class Lent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "draftconf":
            return importlib.machinery.PathFinder.find_spec(name, [root])

sys.meta_path.insert(0, Lent)
from draftconf.conformance.protocol.limits import Limits
from draftconf.conformance.protocol.worker import serve
serve(channel)
"""


class Died(Exception):
    """The process has ended, or cannot be understood any more."""


class Process:
    """One process with the adapter loaded. Every method raises Died or TimeoutError; then only ``kill`` is left."""

    def __init__(self, adapter: str, limits: Limits):
        self.pid, self.tail, self._group = None, deque(), execnet.Group()
        try:
            self._channel = self._launch(limits.interpreter())
            self.pid = self._next(time.monotonic() + LOADING)
            home = str(Path(draftconf.__file__).resolve().parents[1])  # a checkout's has folders that may bear any name
            self._channel.send(home)
            path = [] if limits.python else [str(Path(entry or ".").absolute()) for entry in sys.path]
            path = [entry for entry in path if entry != home or "site-packages" in home]
            self._channel.send({"adapter": adapter, "memory": limits.memory, "path": path})
            self.hello, _ = self._receive(LOADING)
        except BaseException:
            self.kill()
            raise

    def _launch(self, python: str):
        """Its error output is a pipe from the start, which is drained for as long as somebody holds it."""
        reading, writing = os.pipe()
        threading.Thread(target=self._drain, args=(reading,), daemon=True).start()
        kept = os.dup(2)
        os.dup2(writing, 2)
        try:
            gateway = self._group.makegateway(f"popen//python={shlex.quote(python)}")
        except (OSError, EOFError) as error:
            raise Died(f"{python} is no Python interpreter that starts") from error
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(writing)
        return gateway.remote_exec(BOOTSTRAP)

    def _drain(self, reading: int) -> None:
        while data := os.read(reading, 1 << 16):
            self.tail.append(data[-TAIL:])
            while sum(map(len, self.tail)) > 2 * TAIL:
                self.tail.popleft()
        os.close(reading)

    def ask(self, request: dict, groups: dict, timeout: float) -> tuple[dict, dict]:
        try:
            send(self._channel, request, groups)
        except OSError as error:
            raise Died(self.cause()) from error
        return self._receive(timeout)

    def _receive(self, timeout: float) -> tuple[dict, dict]:
        deadline = time.monotonic() + timeout
        try:
            return receive(lambda: self._next(deadline))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise Died(f"answered with what cannot be read: {error}") from error

    def _next(self, deadline: float):
        """The next item. Looks after the process as well: a child that it forked may hold the connection open."""
        while True:
            ended, left = self._ended(), deadline - time.monotonic()
            try:
                return self._channel.receive(timeout=1.0 if ended else max(0.0, min(1.0, left)))
            except self._channel.TimeoutError:
                if ended:
                    raise Died(self.cause()) from None
                if left <= 0:
                    raise TimeoutError from None
            except execnet.RemoteError as error:
                raise Died(str(error).strip().splitlines()[-1]) from None
            except EOFError:
                raise Died(self.cause()) from None

    def _ended(self):
        """Its wait status once it has ended; it stays to be waited for, so that its id is not given away."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if self.pid else None
        except (AttributeError, ChildProcessError):
            return None

    def _await_end(self, seconds: float):
        deadline = time.monotonic() + seconds
        while (ended := self._ended()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return ended

    def cause(self) -> str:
        """How it ended, in words."""
        ended = self._await_end(5.0)
        if ended is None:
            return "the process closed its connection"
        if ended.si_code == os.CLD_EXITED:
            return f"the process ended with exit code {ended.si_status}"
        return f"the process was killed by signal {ended.si_status} ({signal.Signals(ended.si_status).name})"

    def last_words(self) -> str:
        """Where it stood as it crashed, by file name only; else the last lines of its output."""
        text = b"".join(self.tail).decode(errors="replace")
        _, crashed, stack = text.rpartition("Current thread ")  # faulthandler's; the call is above the suite's frames
        frames = [(Path(m[1]), m[2], m[3]) for m in FRAME.finditer(stack)] if crashed else []
        own = [n for n, (path, *_) in enumerate(frames) if path.parts[-2:] == ("protocol", "subject.py")]
        frames = frames[: own[0]] if own else []
        words = [f"{path.name}:{line} in {function}" for path, line, function in frames[:4]]
        return "\n".join(words or [line for line in text.splitlines()[-4:] if line.strip()])

    def close(self) -> None:
        """Let it end by itself, for a while."""
        self._channel.close()
        for gateway in list(self._group):
            gateway.exit()
        self._await_end(3.0)
        self.kill()

    def kill(self) -> None:
        """End it and all that it started in its session."""
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._group.terminate(timeout=1.0)


@dataclass
class IsolatedSubject:
    """Has the methods of subject.Subject. ``notes`` tells what calls left changed."""

    adapter: str  # its name, as given to --adapter
    limits: Limits
    dump: object = None
    notes: set = field(default_factory=set)
    problems: list = field(default_factory=list)

    def __post_init__(self):
        self._running, self._failed, self._process = None, {}, None
        hello = self._load()
        self.description = Description.restored(hello["description"])
        self.offered, self.versions = hello["offers"], hello["versions"]

    def _load(self) -> dict:
        """Start a process. Raises ValueError with a sentence if the adapter cannot be loaded there."""
        try:
            process = Process(self.adapter, self.limits)
        except Died as error:
            raise ValueError(f"adapter {self.adapter!r} cannot be loaded: {error}") from error
        except TimeoutError:
            raise ValueError(f"adapter {self.adapter!r} was not loaded after {LOADING:g} s") from None
        if process.hello["status"] != "loaded":
            process.kill()
            raise ValueError(process.hello["message"])
        self._process = process
        return process.hello

    def offers(self, method: str) -> bool:
        return method in self.offered

    def about(self) -> dict:
        return self.description.to_dict() | {"offers": list(self.offered)}

    def call(self, method: str, *, config, choices, policy: str, inputs, cotangents=None, forced=None) -> Result:
        """Call a method. Raises NotOffered, or AdapterError for anything that is the adapter's fault."""
        if not self.offers(method):
            raise NotOffered(f"{method} is not offered")
        place = {"config": config.to_dict(), "choices": choices.to_dict(), "policy": policy}
        request = {"do": "call", "method": method, **place}
        groups = dict(zip(GROUPS, (inputs, cotangents, forced), strict=True))
        key = fingerprint(request, groups)
        if key in self._failed:
            kind, message, details = self._failed[key]
            raise kind(message, details)
        try:
            self._make_ready(place)
            return self._call(request, groups)
        except AdapterError as error:
            self._failed[key] = type(error), str(error), error.details
            raise

    def _make_ready(self, place: dict) -> None:
        if self._running not in (None, place):
            self.stop()
        if self._process is None:
            try:
                self._load()
            except ValueError as error:  # it was loaded before, so this is no wrong option
                raise AdapterCrash(f"after its process had been ended: {error}") from error

    def _call(self, request: dict, groups: dict) -> Result:
        method = request["method"]
        reply, parts = self._ask(request, groups)
        self._running = {key: request[key] for key in ("config", "choices", "policy")}
        self.versions["torch"] = self.versions["torch"] or reply["torch"]
        if reply["changed"]:
            self.notes.add(f"{method} left {reply['changed'][0]} changed; its process was replaced")
            self._drop()
        if reply["status"] == "not offered":
            raise NotOffered(reply["message"])
        if reply["status"] == "error":
            raise AdapterError(reply["message"], reply["details"])
        return Result(**parts)

    def _ask(self, request: dict, groups: dict) -> tuple[dict, dict]:
        name, timeout, answered = request.get("method", "stop"), self.limits.timeout, False
        try:
            reply = self._process.ask(request, groups, timeout)
            answered = True
            return reply
        except TimeoutError:
            raise AdapterTimeout(f"{name} gave no answer in {timeout:g} s") from None
        except Died as error:
            raise AdapterCrash(f"{name}: {error}", self._process.last_words()) from None
        finally:
            if not answered:  # for whatever reason, an interrupt included
                self._drop()

    def _drop(self) -> None:
        process, self._process, self._running = self._process, None, None
        process.kill()

    def stop(self) -> None:
        """End what ``start`` began. What goes wrong in there is nobody's verdict, but a problem of the run."""
        running, self._running = self._running, None
        if running is None or self._process is None:
            return
        try:
            reply, _ = self._ask({"do": "stop"}, {})
        except AdapterError as error:
            self.problems.append(str(error))
            return
        if reply["status"] == "error":
            self.problems.append(reply["message"])
        if reply["changed"]:  # what start() changed it may leave to this process, not to the next start()
            self._drop()

    def close(self) -> None:
        """Stop, and end the process."""
        self.stop()
        if self._process is not None:
            process, self._process = self._process, None
            process.close()


def fingerprint(request: dict, groups: dict) -> str:
    """Of a call with its arrays."""
    digest = hashlib.sha256(repr(sorted(request.items())).encode())
    for name, group in groups.items():
        for key, value in sorted((group or {}).items()):
            digest.update(f"{name} {key} ".encode())
            if hasattr(value, "tobytes"):
                digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()
