"""Modes floor and ceil take log2 of the maximum in the input's type and it rounds to an integer: floor's scale is one
too high just below 2^k (in bfloat16 for maxima well below), ceil's one too low just above; OCP MX v1.0 section 6.3
takes the largest power of two not above the maximum.
"""
# checks: *.y.exact[*-edges] *.y.exact[*-bfloat16-normal] fake_mxfp4.y.exact[*-bfloat16-clamp]
# adapters: *:floor *:ceil

import torch
from quark.torch.quantization.config.config import OCP_MXFP4Spec
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

found = {}
for mode, value, wanted in (("floor", 1024 - 2.0**-14, 128.0), ("ceil", 1024 + 2.0**-13, 512.0)):
    made = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True, scale_calculation_mode=mode).to_quantization_spec()
    scale, _ = FakeQuantizeBase.get_fake_quantize(made).observe(torch.full((1, 32), value))
    found[mode] = scale.item() == wanted
    print(f"{mode}, max {value.hex()}: scale {scale.item()}, wanted {wanted}")
raise SystemExit(any(found.values()))
