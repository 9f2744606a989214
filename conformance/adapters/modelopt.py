"""NVIDIA ModelOpt's MX tensors (``MXFP4QTensor``, ``MXFP8QTensor``): storing and reading back.

Declared is the rule ``rceil``: the scale is 2^ceil(log2(amax / largest element)), as MXFP8QTensor's comment says and
both compute. There is no option for another rule, no E5M2 and, on a CPU, no fake quantisation.

Install: ``make matrix PACKAGES=nvidia-modelopt`` and add ``--adapter-python .venvs/nvidia-modelopt``.
"""

try:
    import torch
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor
except ImportError as error:
    raise ImportError(
        f"The adapter modelopt needs the package nvidia-modelopt ({error}). Install it with "
        "`make matrix PACKAGES=nvidia-modelopt` and add `--adapter-python .venvs/nvidia-modelopt`"
    ) from error

from ._mx import Quantiser
from ._mx_pairs import apart, packed_of

BLOCK = 32


class ModelOpt(Quantiser):
    package, url = "nvidia-modelopt", "https://github.com/NVIDIA/Model-Optimizer"
    rule = "rceil"
    fp8 = {"e4m3": torch.float8_e4m3fn}

    def mxfp4(self, inputs, *, cotangents=None, forced=None) -> dict:
        x = torch.tensor(inputs["x"], dtype=self.dtype)
        stored, scales = MXFP4QTensor.quantize(x, BLOCK)
        codes = apart(stored._quantized_data.numpy())
        return {"scales": scales.numpy().reshape(*x.shape[:-1], -1), "codes": codes}

    def mxfp8(self, inputs, *, cotangents=None, forced=None) -> dict:
        stored, scales = MXFP8QTensor.quantize(torch.tensor(inputs["x"], dtype=self.dtype))
        return {"scales": scales.numpy(), "codes": stored._quantized_data.view(torch.uint8).numpy()}

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        packed = packed_of(inputs)
        stored = MXFP4QTensor((*packed.shape[:-1], 2 * packed.shape[-1]), self.dtype, torch.tensor(packed))
        scales = torch.tensor(inputs["scales"]).reshape(-1, 1)  # as quantize returns them
        return _values(stored.dequantize(self.dtype, scale=scales, block_sizes={-1: BLOCK}))

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        codes = torch.tensor(inputs["codes"]).view(torch.float8_e4m3fn)
        return _values(MXFP8QTensor(codes.shape, self.dtype, codes).dequantize(scale=torch.tensor(inputs["scales"])))


def _values(tensor) -> dict:
    return {"values": tensor.float().numpy()}


adapter = ModelOpt()
