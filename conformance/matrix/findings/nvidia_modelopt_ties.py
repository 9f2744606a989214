"""MXFP4 elements halfway between two values are rounded toward zero: OCP MX v1.0 section 6.3 wants roundTiesToEven to
be available, and MXFP8QTensor of the same package rounds so.
"""
# checks: mxfp4.codes.exact[*-ties] mxfp4.codes.exact[*-bfloat16-normal] mxfp4.codes.exact[*-bfloat16-edges]
# checks: mxfp4.codes.exact[*-bfloat16-clamp] mxfp4.codes.exact[*-bfloat16-subnormal]

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor

x = torch.tensor([[4.0, 0.75, 1.75, 3.5] + 28 * [1.0]])
stored, scales = MXFP4QTensor.quantize(x, 32)
back = stored.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})[0, 1:4].tolist()
print(f"0.75, 1.75, 3.5 at scale {2.0 ** (int(scales) - 127)}: read back as {back}, wanted [1.0, 2.0, 4.0]")
raise SystemExit(back == [1.0, 2.0, 4.0])
