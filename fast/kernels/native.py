"""The C++ kernels as operators of PyTorch, so that torch.compile can put them into a graph.

All tensors are on the CPU with a contiguous last axis; ``fast.loss`` and ``fast.mx`` see to that.
"""

import ctypes

import torch
from torch import Tensor

from .build import library

DTYPES = (torch.float32, torch.bfloat16)
WORTH_A_THREAD = 1 << 16  # values; fewer take less time than to wake a thread


class Rows(ctypes.Structure):
    """A matrix as rows.h has it."""

    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("is_bfloat16", ctypes.c_int32)]


def _rows(x: Tensor | None):
    return None if x is None else ctypes.byref(Rows(x.data_ptr(), x.stride(0), _is_bfloat16(x)))


def _pointer(x: Tensor | None) -> ctypes.c_void_p | None:
    return None if x is None else ctypes.c_void_p(x.data_ptr())


def _is_bfloat16(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _threads(values: int) -> int:
    return torch.get_num_threads() if values >= WORTH_A_THREAD else 1


def _call(name: str, *arguments) -> None:
    """int becomes int64_t, bool int; the rest are pointers. The interpreter's lock is released meanwhile."""
    kinds = {int: ctypes.c_int64, bool: ctypes.c_int}
    getattr(library(), name)(*(kinds.get(type(x), lambda y: y)(x) for x in arguments))


@torch.library.custom_op("draftconf::lk_normaliser", mutates_args=())
def lk_normaliser(x: Tensor) -> Tensor:
    """Largest logit and log of the sum of exp(x - largest) of each row. x [R, V] -> float32 [R, 2]."""
    normaliser = torch.empty(len(x), 2)
    _call("lk_normaliser", _rows(x), len(x), x.shape[1], _pointer(normaliser), _threads(x.numel()))
    return normaliser


@lk_normaliser.register_fake
def _(x):
    return x.new_empty((len(x), 2), dtype=torch.float32)


@torch.library.custom_op("draftconf::lk_rows", mutates_args=("statistics", "out"))
def lk_rows(
    draft: Tensor,
    target: Tensor,
    target_rows: Tensor | None,
    normaliser: Tensor,
    statistics: Tensor,
    given: bool,
    weight: Tensor | None,
    out: Tensor | None,
) -> None:
    """Writes ``statistics`` float32 [R, 4] (or reads them where ``given``), and the gradient to ``out`` [R, V].

    draft [R, V], target [U, V], target_rows int64 [R] or None, normaliser float32 [U, 2], weight float32 [R].
    """
    _call(
        "lk_rows", _rows(draft), _rows(target), _pointer(target_rows), _pointer(normaliser), len(draft),
        draft.shape[1], _pointer(statistics), given, _pointer(weight), _rows(out), _threads(draft.numel()),
    )  # fmt: skip


@torch.library.custom_op("draftconf::mx_fake_quantize", mutates_args=("out", "inside"))
def mx_fake_quantize(x: Tensor, format: int, carry: int, round_first: bool, out: Tensor, inside: Tensor | None) -> None:
    """x [32n] contiguous to ``out`` of its type; ``inside`` uint8 [32n]: 0 beyond the largest magnitude."""
    _call(
        "mx_fake_quantize", _pointer(x), bool(_is_bfloat16(x)), x.numel() // 32, format, carry, round_first,
        _pointer(out), _pointer(inside), _threads(x.numel()),
    )  # fmt: skip


@torch.library.custom_op("draftconf::mx_quantize", mutates_args=("scales", "codes"))
def mx_quantize(x: Tensor, format: int, carry: int, packed: bool, scales: Tensor, codes: Tensor) -> None:
    """x [32n] contiguous to ``scales`` uint8 [n] and ``codes`` uint8 [32n], or [16n] where ``packed``."""
    _call(
        "mx_quantize", _pointer(x), bool(_is_bfloat16(x)), x.numel() // 32, format, carry, _pointer(scales),
        _pointer(codes), packed, _threads(x.numel()),
    )  # fmt: skip


@torch.library.custom_op("draftconf::mx_dequantize", mutates_args=("out",))
def mx_dequantize(scales: Tensor, codes: Tensor, packed: bool, format: int, out: Tensor) -> None:
    """``scales`` uint8 [n] and ``codes`` uint8 [32n], or [16n] where ``packed``, to ``out`` [32n]."""
    _call(
        "mx_dequantize", _pointer(scales), _pointer(codes), packed, scales.numel(), format, _pointer(out),
        bool(_is_bfloat16(out)), _threads(out.numel()),
    )  # fmt: skip


@torch.library.custom_op("draftconf::situ", mutates_args=("out",))
def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float, out: Tensor) -> None:
    """SiTU-GLU of gate and up to ``out``. All [N, m] of one type."""
    _call("situ", _rows(gate), _rows(up), *gate.shape, _pair(beta, linear_beta), _rows(out), _threads(4 * gate.numel()))


@torch.library.custom_op("draftconf::situ_gradient", mutates_args=("d_gate", "d_up"))
def situ_gradient(
    gate: Tensor, up: Tensor, d_y: Tensor, beta: float, linear_beta: float, d_gate: Tensor, d_up: Tensor
) -> None:
    """The gradient of ``situ`` to ``d_gate`` and ``d_up`` of the type of gate. All [N, m]."""
    _call(
        "situ_gradient", _rows(gate), _rows(up), _rows(d_y), *gate.shape, _pair(beta, linear_beta), _rows(d_gate),
        _rows(d_up), _threads(4 * gate.numel()),
    )  # fmt: skip


def _pair(*numbers: float):
    return (ctypes.c_float * 2)(*numbers)


for operator in (situ, situ_gradient, lk_rows, mx_fake_quantize, mx_quantize, mx_dequantize):
    operator.register_fake(lambda *_: None)
