"""RCEIL's scale is one too low just above 6 * 2^k: log2 of the ratio to 6 is taken in float32 and rounds to an
integer, where the cuBLAS rule that torchao names wants the least power of two at or above the ratio.
"""
# checks: *.exact[*-edges]
# adapters: *:rceil *torchao_qat*

import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

x = torch.zeros(1, 32)
x[0, 0] = 6.0 * (1 + 2**-22) * 2**-20  # above 6 * 2^-20, so 2^-20 is too small a scale
scale, _ = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
found, wanted = int(scale.view(torch.uint8)), 127 - 19
print(f"max {x[0, 0].item().hex()}: scale byte {found}, wanted {wanted}: element {x[0, 0] * 2**20:.7f} is beyond 6")
raise SystemExit(found == wanted)
