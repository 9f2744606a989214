"""In mode even a block with an infinity does not become NaN, as it does in modes floor and ceil; OCP MX v1.0 is silent
here, this suite wants NaN.
"""
# checks: fake_*.y.exact[*-nonfinite]
# adapters: quark

import torch
from quark.torch.quantization.config.config import OCP_MXFP4Spec
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

quantize = FakeQuantizeBase.get_fake_quantize(OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec())
y = quantize(torch.tensor([[float("inf")] + 31 * [1.0]]))[0]
print(f"infinity and 1: {y[:2].tolist()}, wanted [nan, nan]")
raise SystemExit(bool(y.isnan().all()))
