"""MXFP8 scales are one too high for maxima with a significand in [1.75, 1.9375): they are rounded at FP4's mantissa
width, where the package's round_to_power_2 says the width of the element type, which is 3 for E4M3; the block loses
one bit at the bottom of its range.
"""
# checks: mxfp8.*.exact[*-normal] mxfp8.*.exact[*-edges] fake_mxfp8.y.exact[*-normal] mxfp8.scales.exact[*-nonfinite]

import torch
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams

arguments = preset_name_to_scheme("MXFP8A16", ["Linear"]).weights
scale, _ = calculate_qparams(torch.zeros(1, 1), torch.full((1, 1), 448.0), arguments)
print(f"max 448 = 1.75 * 2^8: scale {scale.item()}, wanted 1.0: 448 is E4M3's largest value")
raise SystemExit(scale.item() == 1.0)
