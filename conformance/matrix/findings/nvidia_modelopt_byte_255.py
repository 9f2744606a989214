"""Scale byte 255 is read as 2^128, so elements come back as infinities and only zeros as NaN: OCP MX v1.0 section
5.4.1 has NaN for this byte, and so for the whole block.
"""
# checks: *_decode.values.exact[*-all_codes]

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor

byte = torch.tensor([[255]], dtype=torch.uint8)
packed, codes = torch.full((1, 16), 0x22, dtype=torch.uint8), torch.ones(1, 32).to(torch.float8_e4m3fn)
four = MXFP4QTensor((1, 32), torch.float32, packed).dequantize(torch.float32, scale=byte, block_sizes={-1: 32})[0, 0]
eight = MXFP8QTensor((1, 32), torch.float32, codes).dequantize(torch.float32, scale=byte)[0, 0]
print(f"1 under scale byte 255: {four.item()} in MXFP4, {eight.item()} in MXFP8, wanted nan")
raise SystemExit(bool(four.isnan() or eight.isnan()))
