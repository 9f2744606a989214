"""What an adapter says of itself: ``describe()``, checked and completed."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from draftconf.reference.config import Choices

from .losses import LOSSES, declared
from .pattern import Pattern

PROTOCOL = 1
LAYOUTS = ("mtp", "eagle3")
FORMATS = ("float64", "float32", "tf32", "bfloat16", "float16", "tensor-core")
ROUNDINGS = ("nearest", "stochastic")  # of stores
STORAGE_FORMATS = ("float64", "float32", "bfloat16", "float16")
METHODS = (
    "align", "mxfp4", "mxfp8", "mxfp4_decode", "mxfp8_decode", "fake_mxfp4", "fake_mxfp8", "fusion", "draft_input",
    "situ_glu", "attention", "mla", "route", "moe", "shared_experts", "dense_mlp", "draft_layer", "head", "lk_loss",
    *LOSSES, "unroll", "pattern", "draft_sequence", "speculative_sample",
)  # fmt: skip


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
