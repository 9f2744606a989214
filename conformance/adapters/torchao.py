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
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
except ImportError as error:
    raise ImportError(
        f"The adapter torchao needs the package torchao ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 torchao==0.18.0"
    ) from error

from ._mx import Quantiser
from ._mx_pairs import apart, packed_of

BLOCK = 32
FP4 = torch.float4_e2m1fn_x2


class TorchAO(Quantiser):
    package, url = "torchao", "https://github.com/pytorch/ao"

    def __init__(self, rule: str):
        self.rule, self.mode = rule, ScaleCalculationMode(rule)

    def mxfp4(self, inputs, *, cotangents=None, forced=None) -> dict:
        scales, packed = to_mx(self._tensor(inputs["x"]), FP4, BLOCK, self.mode)
        return {"scales": _bytes(scales), "codes": apart(_bytes(packed))}

    def mxfp8(self, inputs, *, cotangents=None, forced=None) -> dict:
        scales, codes = to_mx(self._tensor(inputs["x"]), self.element, BLOCK, self.mode)
        return {"scales": _bytes(scales), "codes": _bytes(codes)}

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        return self._decode(torch.tensor(packed_of(inputs)), inputs["scales"], FP4)

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        return self._decode(torch.tensor(inputs["codes"]).view(self.element), inputs["scales"], self.element)

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
