"""MX quantisation of one expert's matrix beside a copy of it and torchao."""

from collections.abc import Iterator

import torch

from benchmarks.report import Case, Target
from benchmarks.side_by_side import interleaved
from fast import mx

SHAPE = 6144, 3584
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMITS = {"float32": 3, "bfloat16": 12}
FORMATS = {"mxfp4": "float4_e2m1fn_x2", "mxfp8_e4m3": "float8_e4m3fn"}


class TorchAO:
    """torchao's functions as shipped. Under torch.compile they fail on the CPU: Inductor's C++ has no E8M0 type."""

    def __init__(self):
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

        self.to_mx, self.to_dtype = to_mx, to_dtype

    def quantize(self, x, element):
        return self.to_mx(x, element, 32)

    def dequantize(self, codes, scales, element, dtype):
        return self.to_dtype(codes, scales, element, 32, dtype)

    def fake_quantize(self, x, element):
        scales, codes = self.quantize(x, element)
        return self.dequantize(codes, scales, element, x.dtype)


def peers() -> dict[str, TorchAO]:
    try:
        return {"torchao": TorchAO()}
    except ImportError:
        return {}


def case(what: str, form: str, type_name: str, others: dict, runs: int) -> Case:
    dtype, element = TYPES[type_name], getattr(torch, FORMATS[form])
    x = torch.randn(SHAPE).to(dtype)
    out, buffer = torch.empty_like(x), torch.empty_like(x)
    packed = form == "mxfp4"
    scales, codes = mx.quantize(x, form, packed=packed)
    functions = {"copy": lambda: buffer.copy_(x)}
    if what == "fake-quantise":
        functions["fast"] = lambda: mx.fake_quantize(x, form, out=out)
        functions |= {name: lambda p=peer: p.fake_quantize(x, element) for name, peer in others.items()}
    elif what == "quantise":
        functions["fast"] = lambda: mx.quantize(x, form, packed=packed)
        functions |= {name: lambda p=peer: p.quantize(x, element) for name, peer in others.items()}
    else:
        functions["fast"] = lambda: mx.dequantize(scales, codes, form, packed=packed, out=out)
        theirs = {name: peer.quantize(x, element) for name, peer in others.items()}
        functions |= {
            name: lambda p=peer, t=theirs[name]: p.dequantize(t[1], t[0], element, dtype)
            for name, peer in others.items()
        }
    times = interleaved(functions, runs)
    limit = LIMITS[type_name] if what == "fake-quantise" else 10 if (what, form) == ("dequantise", "mxfp4") else None
    targets = [] if limit is None else [Target("fast", "copy", limit)]
    if others:
        best = min(others, key=lambda name: sorted(times[name])[runs // 2])
        targets.append(Target(best, "fast", 5, at_least=True))
    return Case(f"{what} {form}, {SHAPE[0]} x {SHAPE[1]}, {type_name}", "copy", times, targets=targets)


def measure(runs: int) -> Iterator[Case]:
    others = peers()
    for what in ("fake-quantise", "quantise", "dequantise"):
        for form in FORMATS:
            yield from (case(what, form, type_name, others, runs) for type_name in TYPES)
