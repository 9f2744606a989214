"""A block with a NaN or an infinity does not become NaN but is stored with scale byte 127, a scale of 1; OCP MX v1.0
is silent here, this suite wants 255 for both.
"""
# checks: *.scales.exact[*-nonfinite]

import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams

scheme, found = preset_name_to_scheme("MXFP4A16", ["Linear"]), []
for value in (float("nan"), float("inf")):
    scale, _ = calculate_qparams(torch.zeros(1, 1), torch.full((1, 1), value), scheme.weights)
    weights = {"weight": torch.tensor([[value] + 31 * [1.0]]), "weight_scale": scale}
    found.append(int(MXFP4PackedCompressor.compress(weights, scheme)["weight_scale"]))
    print(f"{value}: scale byte {found[-1]}, wanted 255")
raise SystemExit(255 in found)
