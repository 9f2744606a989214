"""torchao's prototype MX quantiser (``to_mx``, ``to_dtype``): MXFP4 and MXFP8.

``adapter`` declares the rule ``floor``, the default of ``to_mx``; ``rceil``, ``ceil`` and ``even`` declare the others:
``--adapter conformance/adapters/torchao.py:rceil``.

Install: ``make peers``, or ``pip install torch==2.13.0 torchao==0.18.0``.

torchao has no fake-quantise function of its own (its quantisation-aware training fuses one into a linear layer), so
``fake_mxfp4`` and ``fake_mxfp8`` are not offered.
"""

import numpy as np

try:
    import torch
    import torchao
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
except ImportError as error:
    raise ImportError(
        f"The adapter torchao needs the package torchao ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 torchao==0.18.0"
    ) from error

BLOCK = 32
FP4 = torch.float4_e2m1fn_x2
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchAO:
    protocol = 1

    def __init__(self, rule: str):
        self.declared = {"mx_scale_rule": rule}

    def describe(self) -> dict:
        formats = {name: {"storage": name, "accumulate": "float32"} for name in DTYPES}
        return {
            "name": "torchao",
            "version": torchao.__version__,
            "url": "https://github.com/pytorch/ao",
            "formats": formats["float32"],
            "policies": formats,
            "choices": self.declared,
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.rule = ScaleCalculationMode(choices["mx_scale_rule"])
        self.fp8 = FP8[choices["mxfp8_element"]]
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]

    def mxfp4(self, inputs, *, cotangents=None, forced=None) -> dict:
        scales, packed = to_mx(self._tensor(inputs["x"]), FP4, BLOCK, self.rule)
        packed = packed.view(torch.uint8).numpy()
        return {"scales": _bytes(scales), "codes": np.stack([packed & 15, packed >> 4], -1).reshape(inputs["x"].shape)}

    def mxfp8(self, inputs, *, cotangents=None, forced=None) -> dict:
        scales, codes = to_mx(self._tensor(inputs["x"]), self.fp8, BLOCK, self.rule)
        return {"scales": _bytes(scales), "codes": _bytes(codes)}

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        packed = inputs["packed"] if "packed" in inputs else inputs["codes"][..., ::2] | inputs["codes"][..., 1::2] << 4
        return self._decode(torch.tensor(packed), inputs["scales"], FP4)

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        return self._decode(torch.tensor(inputs["codes"]).view(self.fp8), inputs["scales"], self.fp8)

    def _decode(self, elements, scales, element_type) -> dict:
        scales = torch.tensor(scales).view(torch.float8_e8m0fnu)
        return {"values": to_dtype(elements, scales, element_type, BLOCK, self.dtype).float().numpy()}

    def _tensor(self, array):
        return torch.tensor(array, dtype=self.dtype)


def _bytes(tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


adapter = TorchAO("floor")
rceil = TorchAO("rceil")
ceil = TorchAO("ceil")
even = TorchAO("even")
