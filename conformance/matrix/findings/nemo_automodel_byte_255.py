"""Scale byte 255 is read as 2^128, so elements come back as infinities and zeros as zero or NaN: OCP MX v1.0 section
5.4.1 has NaN for this byte, and so for the whole block.
"""
# checks: *_decode.values.exact[*-all_codes]

import torch
from nemo_automodel.components.models.kimi_k3.state_dict_adapter import dequantize_mxfp4

packed, byte = torch.full((1, 16), 0x22, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8)
value = dequantize_mxfp4(packed, byte, torch.float32)[0, 0]
print(f"1 under scale byte 255: {value.item()}, wanted nan")
raise SystemExit(bool(value.isnan()))
