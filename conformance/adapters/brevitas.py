"""Brevitas' MX quantisers of a layer's weight (``MXFloat8e4m3Weight`` and subclasses): fake MXFP8 and MXFP4.

The package's own classes are E4M3; MXFP4 is that class with the element's widths set, which is how the package makes
its floating-point formats. Declared is the rule ``floor``: the MX classes find powers of two by ``FloorSte``.

Install: ``make matrix PACKAGES=brevitas`` and add ``--adapter-python .venvs/brevitas``.
"""

from importlib.metadata import version

try:
    import torch
    from brevitas.nn import QuantLinear
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight
except ImportError as error:
    raise ImportError(
        f"The adapter brevitas needs the package brevitas ({error}). Install it with "
        "`make matrix PACKAGES=brevitas` and add `--adapter-python .venvs/brevitas`"
    ) from error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MXFloat4Weight(MXFloat8e4m3Weight):
    """E2M1."""

    bit_width, exponent_bit_width, mantissa_bit_width = 4, 2, 1


class Brevitas:
    protocol = 1

    def describe(self) -> dict:
        formats = {name: {"storage": name, "accumulate": "float32"} for name in DTYPES}
        return {
            "name": "brevitas",
            "version": version("brevitas"),
            "url": "https://github.com/Xilinx/brevitas",
            "formats": formats["float32"],
            "policies": formats,
            "choices": {"mx_scale_rule": "floor"},
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        if choices["mxfp8_element"] != "e4m3":
            raise NotImplementedError("its MX classes have E4M3 elements only")
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]

    def fake_mxfp4(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(MXFloat4Weight, inputs["x"], cotangents)

    def fake_mxfp8(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(MXFloat8e4m3Weight, inputs["x"], cotangents)

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
