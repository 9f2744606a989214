"""The gradient of a quantised weight q(x) is q(x) / x times the incoming one, not the incoming one itself, and NaN
over the block where x is not finite: the exponents of elements and block are differentiated as functions of x,
where a straight-through estimator holds them fixed.
"""
# checks: fake_*.d_x.*

from brevitas.nn import QuantLinear
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight

layer = QuantLinear(32, 1, bias=False, weight_quant=MXFloat8e4m3Weight)
layer.weight.data.fill_(1.0)[0, 0] = 1.06  # between 1 and 1.125
value = layer.quant_weight().value
value.sum().backward()
found = layer.weight.grad[0, 0].item()
print(f"x = 1.06, q(x) = {value[0, 0].item()}: gradient {found:.7f} = q(x) / x, wanted 1")
raise SystemExit(abs(found - 1) < 1e-3)
