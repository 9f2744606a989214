"""torchao's quantisation-aware linear layer (``MXFakeQuantizedLinear``): fake MXFP4 and MXFP8 with its gradient.

``adapter`` quantises as the layer's input, ``weight`` as its weight; both declare ``rceil``, the layer's default.

The layer computes with ``MXTensor.to_mx(...)`` of both operands and takes ``dequantize`` of them for the backward pass,
so y is that, and d_x is the gradient that the layer passes back when its other operand is the identity, which MX holds
exactly. y is not read off the layer's output: a sum of products with the identity loses the sign of -0.

Install: ``make matrix PACKAGES=torchao`` and add ``--adapter-python .venvs/torchao``.
"""

try:
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.qat import MXFakeQuantizeConfig, MXFakeQuantizedLinear
except ImportError as error:
    raise ImportError(
        f"The adapter torchao_qat needs the package torchao ({error}). Install it with `make matrix PACKAGES=torchao` "
        "and add `--adapter-python .venvs/torchao`, or: pip install torch==2.13.0 torchao==0.18.0"
    ) from error

from ._mx import Quantiser

BLOCK = 32


class TorchAOTraining(Quantiser):
    package, url = "torchao", "https://github.com/pytorch/ao"
    rule = MXFakeQuantizeConfig().scaling_mode.value

    def __init__(self, operand: str):
        self.operand = operand

    @property
    def name(self) -> str:
        return f"torchao, {self.operand} of its quantisation-aware linear layer"

    def fake_mxfp4(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(MXFakeQuantizeConfig(), inputs["x"], cotangents)

    def fake_mxfp8(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(MXFakeQuantizeConfig(dtype=self.element), inputs["x"], cotangents)

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
