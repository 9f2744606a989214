"""Blocks whose largest element is below 1e-10 get the scale 1e-10 / 2^8 (MXFP4: / 2^2), which is no power of two, and
lose small elements, or all: the MX classes inherit scaling_min_val = 1e-10, where OCP MX v1.0 section 6.3 takes the
scale from the block's maximum and E8M0 has 2^-127 to 2^127 only.
"""
# checks: fake_*.y.exact[*-normal] fake_*.y.exact[*-edges] fake_*.y.exact[*-clamp] fake_*.y.exact[*-subnormal]
# checks: fake_*.d_x.exact[*-zero_block] fake_*.d_x.exact[*-signs]

from brevitas.nn import QuantLinear
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight

layer = QuantLinear(32, 1, bias=False, weight_quant=MXFloat8e4m3Weight)
layer.weight.data.fill_(2.0**-60)
quantised = layer.quant_weight()
found, scale = quantised.value[0, 0].item(), quantised.scale_.item()
print(f"32 times 2^-60: scale {scale.hex()}, wanted 2^-68; quantised to {found}, wanted {2.0**-60}")
raise SystemExit(found == 2.0**-60)
