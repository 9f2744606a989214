"""An MXFP4 block with a NaN raises an exception, and a block with an infinity gets a finite scale; OCP MX v1.0 is
silent here, this suite wants scale byte 255 for both.
"""
# checks: *.exact[*-nonfinite]

import numpy as np
from gfloat import formats
from gfloat.block import compute_scale_amax, encode_block

found, fi = [], formats.format_info_mxfp4_e2m1
for value in (float("nan"), float("inf")):
    x = np.array([value] + 31 * [1.0])
    scale = compute_scale_amax(fi.etype.emax, x)
    try:
        codes = list(encode_block(fi, scale, x / scale))
        found.append(codes[0])
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    print(f"{value}: {found[-1]}, wanted scale byte 255")
raise SystemExit(255 in found)
