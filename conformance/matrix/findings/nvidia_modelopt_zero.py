"""+0 is stored as the MXFP4 code of -0, and so is -0; the sign of zero is not mentioned in OCP MX v1.0, this suite
wants it kept.
"""
# checks: mxfp4.codes.exact[*-signs] mxfp4.codes.exact[*-zero_block] mxfp4.codes.exact[*-float32-subnormal]

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor

stored, _ = MXFP4QTensor.quantize(torch.tensor([[1.0] + 31 * [0.0]]), 32)
codes = [code for byte in stored._quantized_data[0].tolist() for code in (byte & 15, byte >> 4)]
print(f"1 and 31 zeros: codes {codes[:4]} ..., wanted {[6, 0, 0, 0]} ...")
raise SystemExit(set(codes[1:]) == {0})
