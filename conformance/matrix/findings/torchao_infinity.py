"""A block with an infinity does not become NaN (scale byte 255) as a block with a NaN does, but gets finite codes; OCP
MX v1.0 is silent here, this suite wants NaN for both.
"""
# checks: *.scales.exact[*-nonfinite] fake_*.y.exact[*-nonfinite]

import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

found = set()
for value in (float("nan"), float("inf")):
    for rule in ScaleCalculationMode:
        scale, codes = to_mx(torch.tensor([[value] + 31 * [1.0]]), torch.float4_e2m1fn_x2, 32, rule)
        found.add((value == value, byte := int(scale.view(torch.uint8))))
        print(f"{value} under {rule.value}: scale byte {byte}, first element code {int(codes[0, 0]) & 15}; wanted 255")
raise SystemExit(not any(infinite and byte != 255 for infinite, byte in found))
