"""The scale of a float64 block is one too high for maxima just below 2^k: log2 rounds to k, where OCP MX v1.0 section
6.3 takes the largest power of two not above the maximum.
"""
# checks: *.exact[*-float64-edges]

import numpy as np
from gfloat import formats
from gfloat.block import compute_scale_amax

x = np.zeros(32)
x[0] = np.nextafter(1024.0, 0.0)
found, wanted = compute_scale_amax(formats.format_info_mxfp4_e2m1.etype.emax, x), 2.0**7
print(f"max {x[0].hex()}, below 1024: scale {found}, wanted {wanted}")
raise SystemExit(bool(found == wanted))
