"""Blocks whose largest element is below 1e-10 get the scale of 1e-10 and lose their small elements, or all: the MX
classes inherit scaling_min_val = 1e-10, where OCP MX v1.0 section 6.3 takes the scale from the block's maximum,
down to 2^-127.
"""
# checks: fake_*.y.exact[*-normal] fake_*.y.exact[*-edges] fake_*.y.exact[*-clamp] fake_*.y.exact[*-subnormal]

from brevitas.nn import QuantLinear
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight

layer = QuantLinear(32, 1, bias=False, weight_quant=MXFloat8e4m3Weight)
layer.weight.data.fill_(2.0**-60)
found = layer.quant_weight().value[0, 0].item()
print(f"32 times 2^-60: quantised to {found}, wanted {2.0**-60}, which E4M3 times 2^-68 holds exactly")
raise SystemExit(found == 2.0**-60)
