"""MXFP4 decoding reads the scale byte 255 as 2^128, but E8M0 reserves it for NaN (OCP MX v1.0, section 5.4.1)."""
# checks: mxfp4_decode.values.exact[*]

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

blocks = torch.tensor([[[[0x20] * 16]]], dtype=torch.uint8)  # codes 0 and 2: the elements 0 and 1
scales = torch.tensor([[[255]]], dtype=torch.uint8)
values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).flatten()[:2].tolist()
print(f"scale byte 255, elements 0 and 1: found {values}, wanted [nan, nan]")
raise SystemExit(all(value != value for value in values))
