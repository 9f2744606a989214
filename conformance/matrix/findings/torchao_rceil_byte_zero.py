"""Under RCEIL a block whose scale byte is 0 reads back as zero: its elements are multiplied by 1 in place of 2^127,
where OCP MX v1.0 section 5.4.1 has 2^-127 for this byte.
"""
# checks: *.exact[*-clamp] *.exact[*-subnormal]
# adapters: *:rceil *torchao_qat*

import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

x, e4m3 = torch.full((1, 32), 2.0**-120), torch.float8_e4m3fn
scale, codes = to_mx(x, e4m3, 32, ScaleCalculationMode.RCEIL)
back = to_dtype(codes, scale, e4m3, 32, torch.float32)[0, 0].item()
print(f"2^-120: scale byte {int(scale.view(torch.uint8)[0, 0])}, read back {back}, wanted {2.0**-120}")
raise SystemExit(back == 2.0**-120)
