"""MXFP4 values that are -0 or round to it come back as +0; the sign of zero is not mentioned in OCP MX v1.0, this
suite wants it kept, as the package's own MXFP8 does.
"""
# checks: fake_mxfp4.y.*

import torch
from quark.torch.quantization.config.config import OCP_MXFP4Spec
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

quantize = FakeQuantizeBase.get_fake_quantize(OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec())
y = quantize(torch.tensor([[1.0, -0.0, -0.01] + 29 * [1.0]]))[0, 1:3]
print(f"-0 and -0.01 beside 1: {y.tolist()}, wanted [-0.0, -0.0]")
raise SystemExit(bool(y.signbit().all()))
