"""Scale byte 255 of gpt-oss weights is read as 2^128, so elements come back as infinities and zeros as zero: OCP MX
v1.0 section 5.4.1 has NaN for this byte, and so for the whole block.
"""
# checks: *_decode.values.exact[*-all_codes]

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

blocks = torch.tensor([0x20] + 15 * [0], dtype=torch.uint8).reshape(1, 1, 1, 16)  # 0, 1, then zeros
values = convert_moe_packed_tensors(blocks, torch.full((1, 1, 1), 255, dtype=torch.uint8), dtype=torch.float32)
print(f"0 and 1 under scale byte 255: {values.flatten()[:2].tolist()}, wanted [nan, nan]")
raise SystemExit(bool(values.isnan().all()))
