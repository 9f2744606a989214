"""Scale byte 255 is read as 2^128, so elements come back as infinities and only zeros as NaN: OCP MX v1.0 section
5.4.1 has NaN for this byte, and so for the whole block.
"""
# checks: *_decode.values.exact[*-all_codes]

import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

packed, byte = torch.full((1, 16), 0x22, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)
stored, scheme = {"weight_packed": packed, "weight_scale": byte}, preset_name_to_scheme("MXFP4A16", ["Linear"])
value = MXFP4PackedCompressor.decompress(stored, scheme)["weight"][0, 0]
print(f"1 under scale byte 255: {value.item()}, wanted nan")
raise SystemExit(bool(value.isnan()))
