"""MX quantisation of one expert's matrix beside a copy of it, torchao, nvidia-modelopt and compressed-tensors."""

from collections.abc import Iterator

import torch

from benchmarks.report import Case, Target
from benchmarks.side_by_side import interleaved
from draftconf.fast import mx

SHAPE = 6144, 3584
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMITS = {"float32": 3, "bfloat16": 12}
FP4, FP8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
FORMATS = {"mxfp4": FP4, "mxfp8_e4m3": FP8}


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


class ModelOpt:
    """nvidia-modelopt's tensors; its fake quantiser is CUDA only, so that is one after the other here too."""

    def __init__(self):
        from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor

        self.mxfp4, self.mxfp8 = MXFP4QTensor, MXFP8QTensor

    def quantize(self, x, element):
        tensor, scales = self.mxfp4.quantize(x, 32) if element == FP4 else self.mxfp8.quantize(x)
        return scales, tensor

    def dequantize(self, tensor, scales, element, dtype):
        blocks = {"block_sizes": {-1: 32}} if element == FP4 else {}
        return tensor.dequantize(dtype=dtype, scale=scales, **blocks)

    def fake_quantize(self, x, element):
        scales, tensor = self.quantize(x, element)
        return self.dequantize(tensor, scales, element, x.dtype)


class CompressedTensors:
    """compressed-tensors: scales from the blocks' extremes, then its compressor, its decompressor or fake_quantize."""

    def __init__(self):
        from compressed_tensors.compressors import MXFP4PackedCompressor, MXFP8QuantizationCompressor
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
        from compressed_tensors.quantization.utils.helpers import calculate_qparams

        self.scheme = {form: preset_name_to_scheme(name, ["Linear"]) for form, name in self.PRESETS.items()}
        self.compressor = {FP4: MXFP4PackedCompressor, FP8: MXFP8QuantizationCompressor}
        self.parameters, self.fake = calculate_qparams, fake_quantize

    PRESETS = {FP4: "MXFP4A16", FP8: "MXFP8A16"}

    def scales(self, x, element):
        blocks = x.unflatten(-1, (-1, 32))
        return self.parameters(blocks.amin(-1), blocks.amax(-1), self.scheme[element].weights)

    def quantize(self, x, element):
        state = {"weight": x, "weight_scale": self.scales(x, element)[0]}
        return None, self.compressor[element].compress(state, self.scheme[element])

    def dequantize(self, state, scales, element, dtype):
        return self.compressor[element].decompress(dict(state), self.scheme[element])["weight"]

    def fake_quantize(self, x, element):
        return self.fake(x, *self.scales(x, element), self.scheme[element].weights)


def peers() -> dict:
    found = {}
    for name, peer in {"torchao": TorchAO, "modelopt": ModelOpt, "compressed-tensors": CompressedTensors}.items():
        try:
            found[name] = peer()
        except ImportError:
            continue
    return found


def functions_of(what: str, form: str, dtype: torch.dtype, others: dict, device: str = "cpu") -> dict:
    """A copy of the matrix, ours, and each peer, by name."""
    element, packed = FORMATS[form], form == "mxfp4"
    x = torch.randn(SHAPE, device=device).to(dtype)
    out, buffer = torch.empty_like(x), torch.empty_like(x)
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
    return functions


def title(what: str, form: str, type_name: str) -> str:
    return f"{what} {form}, {SHAPE[0]} x {SHAPE[1]}, {type_name}"


def case(what: str, form: str, type_name: str, others: dict, runs: int) -> Case:
    times = interleaved(functions_of(what, form, TYPES[type_name], others), runs)
    limit = LIMITS[type_name] if what == "fake-quantise" else 10 if (what, form) == ("dequantise", "mxfp4") else None
    targets = [] if limit is None else [Target("fast", "copy", limit)]
    if others:
        best = min(others, key=lambda name: sorted(times[name])[runs // 2])
        targets.append(Target(best, "fast", 5, at_least=True))
    return Case(title(what, form, type_name), "copy", times, targets=targets)


def measure(runs: int) -> Iterator[Case]:
    others = peers()
    for what in ("fake-quantise", "quantise", "dequantise"):
        for form in FORMATS:
            yield from (case(what, form, type_name, others, runs) for type_name in TYPES)
