"""AMD Quark's MX fake quantisers (``OCP_MXFP4Spec``, ``OCP_MXFP8E4M3Spec``), with their gradients.

``adapter`` declares ``even``, the default of the specifications; ``floor`` and ``ceil`` declare their other options.

Install: ``make matrix PACKAGES=amd-quark`` and add ``--adapter-python .venvs/amd-quark``. The import takes 20 seconds.
"""

import sys

try:
    import torch
    from quark.torch.quantization.config.config import OCP_MXFP4Spec, OCP_MXFP8E4M3Spec, OCP_MXFP8E5M2Spec
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase
except ImportError as error:
    raise ImportError(
        f"The adapter quark needs the package amd-quark ({error}). Install it with "
        "`make matrix PACKAGES=amd-quark` and add `--adapter-python .venvs/amd-quark`"
    ) from error

from ._mx import Quantiser

sys.setrecursionlimit(2000)  # as torch's compiler does at its first use; done here, no call leaves the process changed


class Quark(Quantiser):
    package, url = "amd-quark", "https://github.com/amd/quark"
    fp8 = {"e4m3": OCP_MXFP8E4M3Spec, "e5m2": OCP_MXFP8E5M2Spec}

    def __init__(self, rule: str):
        self.rule = rule

    def fake_mxfp4(self, inputs, *, cotangents=None, forced=None) -> tuple:
        if self.rule == "even" and self.dtype is torch.bfloat16:
            raise NotImplementedError("even for MXFP4 in bfloat16 is for CUDA devices only")
        return self._fake(OCP_MXFP4Spec, inputs["x"], cotangents)

    def fake_mxfp8(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._fake(self.element, inputs["x"], cotangents)

    def _fake(self, specification, x, cotangents) -> tuple:
        made = specification(ch_axis=-1, is_dynamic=True, scale_calculation_mode=self.rule).to_quantization_spec()
        given = torch.tensor(x, dtype=self.dtype, requires_grad=True)
        y = FakeQuantizeBase.get_fake_quantize(made)(given)
        outputs, grads = {"y": y.detach().float().numpy()}, {}
        if cotangents is not None:
            y.backward(torch.tensor(cotangents["y"], dtype=y.dtype))
            grads["x"] = given.grad.float().numpy()
        return outputs, grads


adapter = Quark("even")
floor = Quark("floor")
ceil = Quark("ceil")
