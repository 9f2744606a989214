"""What the adapters of MX quantisers written in PyTorch have in common: two storage types and a declared scale rule."""

from importlib.metadata import version

import torch

from ..torch_helper import DTYPES

POLICIES = {name: {"storage": name, "accumulate": "float32"} for name in ("float32", "bfloat16")}


class Quantiser:
    """Base: a subclass says its ``package`` on PyPI, ``url``, ``rule``, and ``fp8`` by element type if it has others.

    After ``start`` ``dtype`` is the storage type and ``element`` what ``fp8`` has for the MXFP8 element type asked for.
    """

    protocol = 1
    package = url = rule = ""
    fp8: dict = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

    @property
    def name(self) -> str:
        return self.package

    def describe(self) -> dict:
        return {
            "name": self.name,
            "version": version(self.package),
            "url": self.url,
            "formats": POLICIES["float32"],
            "policies": POLICIES,
            "choices": {"mx_scale_rule": self.rule},
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        if choices["mxfp8_element"] not in self.fp8:
            raise NotImplementedError(f"its MXFP8 is {' and '.join(self.fp8).upper()} only")
        self.element = self.fp8[choices["mxfp8_element"]]
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]
