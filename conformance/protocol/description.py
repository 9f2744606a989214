"""What an adapter says of itself: ``describe()``, checked and completed."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from draftconf.reference.config import Choices

from .keys import BY_NAME, KEYS, LAYOUTS, instance, refuse_unknown
from .losses import LOSSES

PROTOCOL = 1
FORMATS = ("float64", "float32", "tf32", "bfloat16", "float16", "tensor-core")
ROUNDINGS = ("nearest", "stochastic")  # of stores
STORAGE_FORMATS = ("float64", "float32", "bfloat16", "float16")
METHODS = (
    "align", "mxfp4", "mxfp8", "mxfp4_decode", "mxfp8_decode", "fake_mxfp4", "fake_mxfp8", "fusion", "draft_input",
    "situ_glu", "attention", "mla", "route", "moe", "shared_experts", "dense_mlp", "draft_layer", "head", "lk_loss",
    *LOSSES, "unroll", "pattern", "draft_sequence", "speculative_sample",
)  # fmt: skip


#: Keys that results.json has under ``extra``, where they differ from the default.
EXTRA = ("quantized", "mx_silent", "sampled_from", "losses", "pattern")


@dataclass(frozen=True)
class Description:
    """``describe()``, checked and completed: its keys (keys.py), with every format filled in.

    ``policies`` maps each policy to its formats; ``choices`` holds what differs from the default, the layouts apart.
    ``losses`` and ``pattern`` are as declared: losses.declared and pattern.Pattern read them.
    """

    name: str
    version: str
    url: str
    formats: dict[str, str]
    choices: dict[str, Any]
    layouts: tuple[str, ...]
    policies: dict[str, dict[str, str]]
    documents: bool = True
    quantized: bool = True
    mx_silent: tuple[str, ...] = ()
    sampled_from: str = "laws"
    losses: Mapping[str, Any] = field(default_factory=dict)
    pattern: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, adapter: Any) -> "Description":
        """Ask an adapter. Raises ValueError with a sentence for a description that cannot be used."""
        protocol = getattr(adapter, "protocol", None)
        if protocol != PROTOCOL or isinstance(protocol, bool):
            raise ValueError(f"the adapter has protocol {protocol!r}; this suite speaks protocol {PROTOCOL}")
        if not callable(getattr(adapter, "describe", None)):
            raise ValueError("the adapter has no method describe()")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                described = adapter.describe()
        except Exception as error:
            raise ValueError(f"describe() raised {type(error).__name__}: {error}") from error
        return cls.from_dict(described)

    @classmethod
    def from_dict(cls, described: Any) -> "Description":
        """From what ``describe()`` returned. Raises ValueError with a sentence, for an unknown key too."""
        instance(Mapping, "a mapping")(described, "describe()")
        refuse_unknown(described)
        present = {name: value for name, value in described.items() if value is not None}
        values = {key.name: key.of(present) for key in KEYS}
        choices = dict(values["choices"])
        layouts = _layouts(present.get("layouts"), choices)
        choices.pop("draft_input", None)  # the layouts say it
        for layout in layouts:
            Choices.from_dict({**choices, "draft_input": layout})
        policies = _policies(values["formats"], values["policies"])
        formats = values["formats"]
        formats = next(iter(policies.values())) if formats is None else _complete(formats, "describe()['formats']")
        completed = {"choices": choices, "layouts": layouts, "policies": policies, "formats": formats}
        return cls(**values | completed | {"mx_silent": tuple(values["mx_silent"])})

    @classmethod
    def restored(cls, described: Mapping[str, Any]) -> "Description":
        """From what ``to_dict`` made of one."""
        return cls.from_dict({k: v for k, v in described.items() if k != "extra"} | described["extra"])

    def choices_for(self, layout: str, **changes: Any) -> Choices:
        """The declared choices in one layout."""
        return Choices.from_dict({**self.choices, "draft_input": layout, **changes})

    def to_dict(self) -> dict[str, Any]:
        """As results.json has it under ``subject``."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in EXTRA}
        extra = {name: getattr(self, name) for name in EXTRA if getattr(self, name) != BY_NAME[name].default}
        return values | {"layouts": list(self.layouts), "extra": extra}


def _layouts(layouts: Any, choices: dict[str, Any]) -> tuple[str, ...]:
    chosen = choices.get("draft_input")
    if layouts is None:
        layouts = LAYOUTS if chosen is None else (chosen,)
    if not layouts or len(set(layouts)) != len(layouts) or not set(layouts) <= set(LAYOUTS):
        raise ValueError(f"describe()['layouts'] is {list(layouts)!r}; wanted some of {', '.join(LAYOUTS)}, each once")
    if chosen is not None and chosen not in layouts:
        raise ValueError(f"choices has draft_input {chosen!r}, which is not one of the layouts {list(layouts)!r}")
    return tuple(layouts)


def _policies(formats: Any, policies: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    if not policies:
        if formats is None:
            raise ValueError("describe() has no 'formats'; wanted at least {'storage': 'float32'} or another format")
        formats = _complete(formats, "describe()['formats']")
        return {formats["storage"]: formats}
    if not all(isinstance(name, str) and name for name in policies):
        raise ValueError(f"describe()['policies'] has the names {list(policies)!r}; wanted strings")
    return {name: _complete(value, f"describe()['policies'][{name!r}]") for name, value in policies.items()}


def _complete(formats: Any, where: str) -> dict[str, str]:
    """Fill in the formats that were left out; refuse unknown ones."""
    instance(Mapping, "a mapping")(formats, where)
    formats = dict(formats)
    for key, value in formats.items():
        allowed = ROUNDINGS if key == "rounding" else FORMATS
        if not isinstance(key, str) or value not in allowed:
            raise ValueError(f"{where} has {key!r}: {value!r}; wanted one of {', '.join(allowed)}")
    storage = formats.get("storage")
    if storage not in STORAGE_FORMATS:
        raise ValueError(f"{where} has storage {storage!r}; wanted one of {', '.join(STORAGE_FORMATS)}")
    accumulate = formats.setdefault("accumulate", storage if storage in ("float64", "float32") else "float32")
    # tf32 and tensor-core say how, not in which type
    computed = "float32" if accumulate in ("tf32", "tensor-core") else accumulate
    formats.setdefault("router", computed)
    formats.setdefault("logits", computed)
    formats.setdefault("attention_output", storage)
    return formats
