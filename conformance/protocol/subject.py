"""An adapter in this process, called safely.

An adapter is any object with ``protocol = 1``, ``describe()`` and a method for each stage it offers; it need not import
this module. What it is handed are read-only copies, never expected values; what it returns is copied before use.
"""

import inspect
import warnings
from collections.abc import Mapping

import numpy as np

from draftconf.reference.config import Choices, DraftConfig

from .description import METHODS, Description
from .result import AdapterError, NotOffered, Result, _first_line, frames, read_result


class Subject:
    """An adapter under test, in this process. ``dump`` is where failing checks save their arrays, or None."""

    versions = None  # those of this process
    notes: set = frozenset()
    problems: list = ()

    def __init__(self, adapter, *, dump=None):
        self.adapter, self.dump = adapter, dump
        self.description = Description.of(adapter)
        self._takes_formats = _takes_formats(getattr(adapter, "start", None))
        self._running = None
        if len(self.description.policies) > 1 and not self._takes_formats:
            names = ", ".join(self.description.policies)
            raise ValueError(f"describe() lists the policies {names}, so start() must take a third argument, formats")

    def offers(self, method: str) -> bool:
        return callable(getattr(self.adapter, method, None))

    def about(self) -> dict:
        """The description, and the methods of the protocol that are there."""
        return self.description.to_dict() | {"offers": [method for method in METHODS if self.offers(method)]}

    def call(self, method: str, *, config: DraftConfig, choices: Choices, policy: str, inputs, cotangents=None,
             forced=None) -> Result:  # fmt: skip
        """Call a method. Raises NotOffered, or AdapterError for anything that is the adapter's fault."""
        if not self.offers(method):
            raise NotOffered(f"{method} is not offered")
        self._start(config, choices, policy)
        handed = [None if group is None else _read_only(group) for group in (inputs, cotangents, forced)]
        given, cotangents_given, forced_given = (None if group is None else dict(group) for group in handed)
        result = read_result(self._run(method, given, cotangents=cotangents_given, forced=forced_given), method)
        for original, group in zip((inputs, cotangents, forced), handed, strict=True):
            _refuse_changes(method, original or {}, group or {})
        return result

    def stop(self) -> None:
        """End what ``start`` began; harmless when nothing runs."""
        running, self._running = self._running, None
        if running is not None and self.offers("stop"):
            self._run("stop")

    def close(self) -> None:
        self.stop()

    def _start(self, config: DraftConfig, choices: Choices, policy: str) -> None:
        wanted = (config, choices, policy)
        if self._running == wanted:
            return
        if policy not in self.description.policies:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(self.description.policies)}")
        self.stop()
        if self.offers("start"):
            formats = {"formats": dict(self.description.policies[policy])} if self._takes_formats else {}
            self._run("start", config.to_dict(), choices.to_dict(), **formats)
        self._running = wanted

    def _run(self, method: str, *args, **kwargs):
        try:
            with warnings.catch_warnings(), np.errstate():
                warnings.simplefilter("ignore")  # its warnings are its own; torch, for one, warns of read-only arrays
                return getattr(self.adapter, method)(*args, **kwargs)
        except NotImplementedError as error:
            raise NotOffered(_first_line(error) or f"{method} is not offered for this case") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and pytest.skip included: an adapter cannot stop or skip a check
            text = f"{method} raised {type(error).__name__}: {_first_line(error)}".rstrip(": ")
            raise AdapterError(text, frames(error)) from error


def _takes_formats(start) -> bool:
    if not callable(start):
        return False
    parameters = inspect.signature(start).parameters.values()
    return any(p.name == "formats" or p.kind is p.VAR_KEYWORD for p in parameters)


def _read_only(group: Mapping) -> dict:
    return {name: _sealed(value) if isinstance(value, np.ndarray) else value for name, value in group.items()}


def _sealed(array: np.ndarray) -> np.ndarray:
    base = np.array(array, order="C")
    base.setflags(write=False)
    return base.view()  # a view of a read-only array cannot be made writeable again


def _refuse_changes(method: str, originals: Mapping, handed: Mapping) -> None:
    for name, original in originals.items():
        if isinstance(original, np.ndarray) and original.tobytes() != handed[name].base.tobytes():
            raise AdapterError(f"{method} changed its input {name!r}, which is read-only")
