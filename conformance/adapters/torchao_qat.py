"""torchao's quantisation-aware linear layer (``MXFakeQuantizedLinear``): fake MXFP4 and MXFP8 with its gradient.

``adapter`` quantises as the layer's input, ``weight`` as its weight; both declare ``rceil``, the layer's default.

The layer computes with ``MXTensor.to_mx(...)`` of both operands and takes ``dequantize`` of them for the backward pass,
so y is that, and d_x is the gradient that the layer passes back when its other operand is the identity, which MX holds
exactly. y is not read off the layer's output: a sum of products with the identity loses the sign of -0.

Install: ``make matrix PACKAGES=torchao`` and add ``--adapter-python .venvs/torchao``.
"""

try:
    import torch
    import torchao
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.qat import MXFakeQuantizeConfig, MXFakeQuantizedLinear
except ImportError as error:
    raise ImportError(
        f"The adapter torchao_qat needs the package torchao ({error}). Install it with `make matrix PACKAGES=torchao` "
        "and add `--adapter-python .venvs/torchao`, or: pip install torch==2.13.0 torchao==0.18.0"
    ) from error

BLOCK = 32
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchAOTraining:
    protocol = 1

    def __init__(self, operand: str):
        self.operand = operand

    def describe(self) -> dict:
        formats = {name: {"storage": name, "accumulate": "float32"} for name in DTYPES}
        return {
            "name": f"torchao, {self.operand} of its quantisation-aware linear layer",
            "version": torchao.__version__,
            "url": "https://github.com/pytorch/ao",
            "formats": formats["float32"],
            "policies": formats,
            "choices": {"mx_scale_rule": MXFakeQuantizeConfig().scaling_mode.value},
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.fp8 = FP8[choices["mxfp8_element"]]
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]

    def fake_mxfp4(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(MXFakeQuantizeConfig(), inputs["x"], cotangents)

    def fake_mxfp8(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(MXFakeQuantizeConfig(dtype=self.fp8), inputs["x"], cotangents)

    def _fake(self, config, x, cotangents) -> tuple:
        blocks = torch.tensor(x, dtype=self.dtype).reshape(-1, BLOCK)
        quantised = MXTensor.to_mx(blocks, config.dtype, BLOCK, config.scaling_mode)
        outputs = {"y": quantised.dequantize(self.dtype).float().numpy().reshape(x.shape)}
        if cotangents is None:
            return outputs, {}
        d_y = torch.tensor(cotangents["y"], dtype=self.dtype).reshape(-1, BLOCK)
        gradient = self._gradient(config, blocks, d_y)
        return outputs, {"x": gradient.float().numpy().reshape(x.shape)}

    def _gradient(self, config, blocks, d_y):
        """What the layer passes back to this operand; the other one is the identity."""
        identity = torch.eye(BLOCK, dtype=self.dtype)
        if self.operand == "input":
            layer, given, d_output = self._layer(config, identity), blocks.requires_grad_(), d_y
            layer(given).backward(d_output)
            return given.grad
        layer = self._layer(config, blocks)
        layer(identity).backward(d_y.T.contiguous())
        return layer.weight.grad

    def _layer(self, config, weight):
        layer = MXFakeQuantizedLinear(BLOCK, len(weight), False, config, config, dtype=self.dtype)
        layer.weight.data.copy_(weight)
        return layer


adapter = TorchAOTraining("input")
weight = TorchAOTraining("weight")
