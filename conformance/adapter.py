"""How an implementation plugs in: loading it, reading what it declares, and calling it safely.

An adapter is any object with ``protocol = 1``, ``describe()`` and a method for each stage it offers; it need not import
this module. What it is handed are read-only copies, never expected values; what it returns is copied before use.
"""

import inspect
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from draftconf.reference.config import Choices, DraftConfig

from .loading import load as load
from .losses import LOSSES, declared
from .pattern import Pattern

PROTOCOL = 1
LAYOUTS = ("mtp", "eagle3")
FORMATS = ("float64", "float32", "tf32", "bfloat16", "float16", "tensor-core")
ROUNDINGS = ("nearest", "stochastic")  # of stores
STORAGE_FORMATS = ("float64", "float32", "bfloat16", "float16")
EXTENSION_TYPES = ("bfloat16", "float8_", "float6_", "float4_")  # NumPy dtypes of ml_dtypes, exact in float32
METHODS = (
    "align", "mxfp4", "mxfp8", "mxfp4_decode", "mxfp8_decode", "fake_mxfp4", "fake_mxfp8", "fusion", "draft_input",
    "situ_glu", "attention", "mla", "route", "moe", "shared_experts", "dense_mlp", "draft_layer", "head", "lk_loss",
    *LOSSES, "unroll", "pattern", "draft_sequence", "speculative_sample",
)  # fmt: skip


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


# -- what it declares ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Description:
    """``describe()``, checked and completed.

    ``policies`` maps each policy to its formats; ``choices`` holds what differs from the default, the layouts apart.
    """

    name: str
    version: str
    url: str
    formats: dict
    choices: dict
    layouts: tuple
    policies: dict
    documents: bool = True
    extra: dict = field(default_factory=dict)

    @classmethod
    def of(cls, adapter) -> "Description":
        """Ask an adapter. Raises ValueError with a sentence for a description that cannot be used."""
        protocol = getattr(adapter, "protocol", None)
        if protocol != PROTOCOL or isinstance(protocol, bool):
            raise ValueError(f"the adapter has protocol {protocol!r}; this suite speaks protocol {PROTOCOL}")
        if not callable(getattr(adapter, "describe", None)):
            raise ValueError("the adapter has no method describe()")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = adapter.describe()
        except Exception as error:
            raise ValueError(f"describe() raised {type(error).__name__}: {error}") from error
        return cls.from_dict(said)

    @classmethod
    def from_dict(cls, said) -> "Description":
        _expect(said, Mapping, "describe()", "a mapping")
        said = dict(said)
        name = _expect(said.pop("name", None), str, "describe()['name']", "a string")
        version = _expect(said.pop("version", ""), str, "describe()['version']", "a string")
        url = _expect(said.pop("url", ""), str, "describe()['url']", "a string")
        choices = dict(_expect(said.pop("choices", {}), Mapping, "describe()['choices']", "a mapping"))
        layouts = _layouts(said.pop("layouts", None), choices)
        choices.pop("draft_input", None)  # the layouts say it
        for layout in layouts:
            Choices.from_dict({**choices, "draft_input": layout})
        formats, policies = said.pop("formats", None), said.pop("policies", None)
        policies = _policies(formats, policies)
        formats = _complete(formats, "describe()['formats']") if formats is not None else next(iter(policies.values()))
        if "pattern" in said:
            Pattern.of(said["pattern"])
        if "losses" in said:
            declared(said["losses"])
        documents = _expect(said.pop("documents", True), bool, "describe()['documents']", "True or False")
        return cls(name, version, url, formats, choices, layouts, policies, documents, said)

    def choices_for(self, layout: str, **changes) -> Choices:
        return Choices.from_dict({**self.choices, "draft_input": layout, **changes})

    def to_dict(self) -> dict:
        return {**asdict(self), "layouts": list(self.layouts)}


def _expect(value, kind, where: str, wanted: str):
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {value!r}; wanted {wanted}")
    return value


def _layouts(layouts, choices: dict) -> tuple:
    chosen = choices.get("draft_input")
    if layouts is None:
        layouts = LAYOUTS if chosen is None else (chosen,)
    _expect(layouts, list | tuple, "describe()['layouts']", "a list")
    if not layouts or len(set(layouts)) != len(layouts) or not set(layouts) <= set(LAYOUTS):
        raise ValueError(f"describe()['layouts'] is {list(layouts)!r}; wanted some of {', '.join(LAYOUTS)}, each once")
    if chosen is not None and chosen not in layouts:
        raise ValueError(f"choices has draft_input {chosen!r}, which is not one of the layouts {list(layouts)!r}")
    return tuple(layouts)


def _policies(formats, policies) -> dict:
    if policies is None or policies == {}:
        if formats is None:
            raise ValueError("describe() has no 'formats'; wanted at least {'storage': 'float32'} or another format")
        formats = _complete(formats, "describe()['formats']")
        return {formats["storage"]: formats}
    _expect(policies, Mapping, "describe()['policies']", "a mapping from names to formats")
    if not all(isinstance(name, str) and name for name in policies):
        raise ValueError(f"describe()['policies'] has the names {list(policies)!r}; wanted strings")
    return {name: _complete(value, f"describe()['policies'][{name!r}]") for name, value in policies.items()}


def _complete(formats, where: str) -> dict:
    """Fill in the formats that were left out; refuse unknown ones."""
    formats = dict(_expect(formats, Mapping, where, "a mapping"))
    for key, value in formats.items():
        allowed = ROUNDINGS if key == "rounding" else FORMATS
        if not isinstance(key, str) or value not in allowed:
            raise ValueError(f"{where} has {key!r}: {value!r}; wanted one of {', '.join(allowed)}")
    storage = formats.get("storage")
    if storage not in STORAGE_FORMATS:
        raise ValueError(f"{where} has storage {storage!r}; wanted one of {', '.join(STORAGE_FORMATS)}")
    accumulate = formats.setdefault("accumulate", storage if storage in ("float64", "float32") else "float32")
    computed = (
        "float32" if accumulate in ("tf32", "tensor-core") else accumulate
    )  # these two say how, not in which type
    formats.setdefault("router", computed)
    formats.setdefault("logits", computed)
    formats.setdefault("attention_output", storage)
    return formats


# -- calling it ------------------------------------------------------------------------------------------------------


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


def _first_line(error: BaseException, limit: int = 300) -> str:
    return (str(error).strip().splitlines() or [""])[0][:limit]


def frames(error: BaseException, limit: int = 4) -> str:
    """The last traceback lines, by file name only, so that they read the same on every machine."""
    frames = traceback.extract_tb(error.__traceback__)[1:][-limit:]
    return "\n".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in frames)


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
