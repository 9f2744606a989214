"""In modes floor and ceil a bfloat16 block with a maximum below about 2^-125 comes back as zeros in MXFP8: its scale
underflows in bfloat16 and is replaced by a large one, where 2^-127 (OCP MX v1.0 section 5.4.1) would hold its
values.
"""
# checks: fake_mxfp8.y.exact[*-bfloat16-subnormal]
# adapters: *:floor *:ceil

import torch
from quark.torch.quantization.config.config import OCP_MXFP8E4M3Spec
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

made = OCP_MXFP8E4M3Spec(ch_axis=-1, is_dynamic=True, scale_calculation_mode="floor").to_quantization_spec()
y = FakeQuantizeBase.get_fake_quantize(made)(torch.full((1, 32), 2.0**-128, dtype=torch.bfloat16))[0, 0].item()
print(f"2^-128 in MXFP8: {y.hex()}, wanted {(2.0**-128).hex()}")
raise SystemExit(y == 2.0**-128)
