"""Modes floor and ceil do not hold the scale at 2^-127, the least that E8M0 has (OCP MX v1.0 section 5.4.1): fake-
quantised values of small blocks are finer than any MX block can hold.
"""
# checks: fake_mxfp4.y.exact[*-subnormal] fake_mxfp8.y.exact[*-float32-clamp]
# adapters: *:floor *:ceil

import torch
from quark.torch.quantization.config.config import OCP_MXFP4Spec
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

made = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True, scale_calculation_mode="floor").to_quantization_spec()
y = FakeQuantizeBase.get_fake_quantize(made)(torch.full((1, 32), 2.0**-140))[0, 0].item()
print(f"2^-140 in MXFP4: {y.hex()}, wanted 0: the least value beside it is 2^-128")
raise SystemExit(y == 0)
