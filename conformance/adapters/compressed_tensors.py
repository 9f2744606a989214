"""compressed-tensors' MX weights: MXFP4 and MXFP8 as it stores them, reads them back, and fake-quantises.

The scales are ``calculate_qparams`` of each block's extremes, the codes what the compressors of the presets MXFP4A16
and MXFP8A16 write. Declared is the rule ``even``: ``round_to_power_2`` is to round a maximum by the mantissa width of
the element type. The package has no other rule, no E5M2 and no gradient; it reads back in bfloat16 only.

Install: ``make matrix PACKAGES=compressed-tensors`` and add ``--adapter-python .venvs/compressed-tensors``.
"""

import numpy as np

try:
    import torch
    from compressed_tensors.compressors import MXFP4PackedCompressor, MXFP8QuantizationCompressor
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams
except ImportError as error:
    raise ImportError(
        f"The adapter compressed_tensors needs the package compressed-tensors ({error}). Install it with "
        "`make matrix PACKAGES=compressed-tensors` and add `--adapter-python .venvs/compressed-tensors`"
    ) from error

from ._mx import Quantiser
from ._mx_pairs import apart, packed_of

BLOCK = 32
FP4, FP8 = (preset_name_to_scheme(name, ["Linear"]) for name in ("MXFP4A16", "MXFP8A16"))


class CompressedTensors(Quantiser):
    package, url = "compressed-tensors", "https://github.com/vllm-project/compressed-tensors"
    rule = "even"
    fp8 = {"e4m3": torch.float8_e4m3fn}

    def mxfp4(self, inputs, *, cotangents=None, forced=None) -> dict:
        rows, scales, _ = self._rows(inputs["x"], FP4)
        stored = MXFP4PackedCompressor.compress({"weight": rows, "weight_scale": scales}, FP4)
        packed = stored["weight_packed"].numpy()
        return _encoded(stored, apart(packed), inputs["x"].shape)

    def mxfp8(self, inputs, *, cotangents=None, forced=None) -> dict:
        rows, scales, _ = self._rows(inputs["x"], FP8)
        stored = MXFP8QuantizationCompressor.compress({"weight": rows, "weight_scale": scales}, FP8)
        return _encoded(stored, stored["weight"].view(torch.uint8).numpy(), inputs["x"].shape)

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        self._refuse_float32()
        state = {"weight_packed": torch.tensor(packed_of(inputs)), "weight_scale": torch.tensor(inputs["scales"])}
        return {"values": MXFP4PackedCompressor.decompress(state, FP4)["weight"].float().numpy()}

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        self._refuse_float32()
        codes = torch.tensor(inputs["codes"]).view(torch.float8_e4m3fn)
        state = {"weight": codes, "weight_scale": torch.tensor(inputs["scales"])}
        return {"values": MXFP8QuantizationCompressor.decompress(state, FP8)["weight"].float().numpy()}

    def fake_mxfp4(self, inputs, *, cotangents=None, forced=None) -> dict:
        return self._fake(inputs["x"], FP4)

    def fake_mxfp8(self, inputs, *, cotangents=None, forced=None) -> dict:
        return self._fake(inputs["x"], FP8)

    def _refuse_float32(self) -> None:
        if self.dtype is not torch.bfloat16:
            raise NotImplementedError("it reads back in bfloat16 only")

    def _fake(self, x, scheme) -> dict:
        rows, scales, zero_points = self._rows(x, scheme)
        return {"y": fake_quantize(rows, scales, zero_points, scheme.weights).float().numpy().reshape(x.shape)}

    def _rows(self, x, scheme) -> tuple:
        """A matrix, and the scales and zero points of its blocks."""
        rows = torch.tensor(x, dtype=self.dtype).reshape(-1, x.shape[-1])
        blocks = rows.unflatten(-1, (-1, BLOCK))
        return rows, *calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)


def _encoded(stored: dict, codes: np.ndarray, shape: tuple) -> dict:
    scales = stored["weight_scale"].numpy().reshape(*shape[:-1], shape[-1] // BLOCK)
    return {"scales": scales, "codes": codes.reshape(shape)}


adapter = CompressedTensors()
