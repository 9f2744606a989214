"""A block whose scale byte is 0 (2^-127) reads back at half its value: FLOOR, CEIL and EVEN divide its elements by
2^-126, the smallest normal float32, where OCP MX v1.0 section 5.4.1 has 2^-127 for this byte, as torchao's own
to_dtype does.
"""
# checks: *.exact[*-clamp] *.exact[*-subnormal]
# adapters: torchao *:ceil *:even

import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

x, e4m3 = torch.full((1, 32), 2.0**-120), torch.float8_e4m3fn
scale, codes = to_mx(x, e4m3, 32, ScaleCalculationMode.FLOOR)
back = to_dtype(codes, scale, e4m3, 32, torch.float32)[0, 0].item()
print(f"2^-120: scale byte {int(scale.view(torch.uint8)[0, 0])}, read back {back.hex()}, wanted {(2.0**-120).hex()}")
raise SystemExit(back == 2.0**-120)
