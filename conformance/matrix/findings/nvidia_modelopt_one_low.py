"""The scale is one too low for maxima just above 6 * 2^k (MXFP4) and 448 * 2^k (MXFP8): log2 in float32 rounds to an
integer, where 2^ceil(log2(amax / largest)) is the least power of two at or above the ratio.
"""
# checks: *.exact[*-float32-edges]

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor

low = []
for largest, quantize in ((6.0, lambda x: MXFP4QTensor.quantize(x, 32)), (448.0, MXFP8QTensor.quantize)):
    x = torch.tensor([[largest * (1 + 2**-22) * 2**-20] + 31 * [0.0]])
    found, wanted = int(quantize(x)[1]), 127 - 19
    print(f"max {x[0, 0].item().hex()}, just above {largest:g} * 2^-20: scale byte {found}, wanted {wanted}")
    low.append(found == wanted - 1)
raise SystemExit(not all(low))
