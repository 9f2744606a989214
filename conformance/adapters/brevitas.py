"""Brevitas' MX quantisers of a layer's weight (``MXFloat8e4m3Weight`` and subclasses): fake MXFP8 and MXFP4.

The package's own classes are E4M3; MXFP4 is that class with the element's widths set, which is how the package makes
its floating-point formats. Declared is the rule ``floor``: the MX classes find powers of two by ``FloorSte``.

Install: ``make matrix PACKAGES=brevitas`` and add ``--adapter-python .venvs/brevitas``.
"""

try:
    import torch
    from brevitas.nn import QuantLinear
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight
except ImportError as error:
    raise ImportError(
        f"The adapter brevitas needs the package brevitas ({error}). Install it with "
        "`make matrix PACKAGES=brevitas` and add `--adapter-python .venvs/brevitas`"
    ) from error

from ._mx import Quantiser


class MXFloat4Weight(MXFloat8e4m3Weight):
    """E2M1."""

    bit_width, exponent_bit_width, mantissa_bit_width = 4, 2, 1


class Brevitas(Quantiser):
    package, url = "brevitas", "https://github.com/Xilinx/brevitas"
    rule = "floor"
    fp8 = {"e4m3": MXFloat8e4m3Weight}

    def fake_mxfp4(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(MXFloat4Weight, inputs["x"], cotangents)

    def fake_mxfp8(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(self.element, inputs["x"], cotangents)

    def _fake(self, quantizer, x, cotangents) -> tuple:
        rows = torch.tensor(x, dtype=self.dtype).reshape(-1, x.shape[-1])
        layer = QuantLinear(rows.shape[1], rows.shape[0], bias=False, weight_quant=quantizer, dtype=self.dtype)
        layer.weight.data.copy_(rows)
        y = layer.quant_weight().value
        outputs, grads = {"y": y.detach().float().numpy().reshape(x.shape)}, {}
        if cotangents is not None:
            y.backward(torch.tensor(cotangents["y"], dtype=self.dtype).reshape(y.shape))
            grads["x"] = layer.weight.grad.float().numpy().reshape(x.shape)
        return outputs, grads


adapter = Brevitas()
