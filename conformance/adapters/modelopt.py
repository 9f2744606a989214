"""NVIDIA ModelOpt's MX tensors (``MXFP4QTensor``, ``MXFP8QTensor``): storing and reading back.

Declared is the rule ``rceil``: the scale is 2^ceil(log2(amax / largest element)), as MXFP8QTensor's comment says and
both compute. There is no option for another rule, no E5M2 and, on a CPU, no fake quantisation.

Install: ``make matrix PACKAGES=nvidia-modelopt`` and add ``--adapter-python .venvs/nvidia-modelopt``.
"""

from importlib.metadata import version

import numpy as np

try:
    import torch
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor
except ImportError as error:
    raise ImportError(
        f"The adapter modelopt needs the package nvidia-modelopt ({error}). Install it with "
        "`make matrix PACKAGES=nvidia-modelopt` and add `--adapter-python .venvs/nvidia-modelopt`"
    ) from error

BLOCK = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelOpt:
    protocol = 1

    def describe(self) -> dict:
        formats = {name: {"storage": name, "accumulate": "float32"} for name in DTYPES}
        return {
            "name": "nvidia-modelopt",
            "version": version("nvidia-modelopt"),
            "url": "https://github.com/NVIDIA/Model-Optimizer",
            "formats": formats["float32"],
            "policies": formats,
            "choices": {"mx_scale_rule": "rceil"},
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        if choices["mxfp8_element"] != "e4m3":
            raise NotImplementedError("its MXFP8 is E4M3 only")
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]

    def mxfp4(self, inputs, *, cotangents=None, forced=None) -> dict:
        x = torch.tensor(inputs["x"], dtype=self.dtype)
        stored, scales = MXFP4QTensor.quantize(x, BLOCK)
        packed = stored._quantized_data.numpy()
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(x.shape)
        return {"scales": scales.numpy().reshape(*x.shape[:-1], -1), "codes": codes}

    def mxfp8(self, inputs, *, cotangents=None, forced=None) -> dict:
        stored, scales = MXFP8QTensor.quantize(torch.tensor(inputs["x"], dtype=self.dtype))
        return {"scales": scales.numpy(), "codes": stored._quantized_data.view(torch.uint8).numpy()}

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        packed = inputs["packed"] if "packed" in inputs else inputs["codes"][..., ::2] | inputs["codes"][..., 1::2] << 4
        stored = MXFP4QTensor((*packed.shape[:-1], 2 * packed.shape[-1]), self.dtype, torch.tensor(packed))
        scales = torch.tensor(inputs["scales"]).reshape(-1, 1)  # as quantize returns them
        return _values(stored.dequantize(self.dtype, scale=scales, block_sizes={-1: BLOCK}))

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        codes = torch.tensor(inputs["codes"]).view(torch.float8_e4m3fn)
        return _values(MXFP8QTensor(codes.shape, self.dtype, codes).dequantize(scale=torch.tensor(inputs["scales"])))


def _values(tensor) -> dict:
    return {"values": tensor.float().numpy()}


adapter = ModelOpt()
