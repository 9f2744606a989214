"""A block with a NaN or an infinity does not become NaN: a NaN gets scale byte 0, an infinity a finite scale; OCP MX
v1.0 is silent here, this suite wants scale byte 255 for both.
"""
# checks: *.scales.exact[*-nonfinite]

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor

found = []
for value in (float("nan"), float("inf")):
    x = torch.tensor([[value] + 31 * [1.0]])
    found += [int(MXFP4QTensor.quantize(x, 32)[1]), int(MXFP8QTensor.quantize(x)[1])]
    print(f"{value}: scale byte {found[-2]} in MXFP4, {found[-1]} in MXFP8, wanted 255")
raise SystemExit(255 in found)
