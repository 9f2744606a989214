"""gfloat's block formats: MXFP4 and MXFP8 in pure Python, exact, one block a call; scale rule ``floor``.

Install: ``make peers``, or ``pip install --no-deps gfloat==0.5.2 array-api-compat==1.16.0``. Needs NumPy, no torch.
"""

from importlib.metadata import version

import numpy as np

try:
    from gfloat import formats
    from gfloat.block import compute_scale_amax, decode_block, encode_block
except ImportError as error:
    raise ImportError(
        f"The adapter gfloat needs the package gfloat ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install --no-deps gfloat==0.5.2 array-api-compat==1.16.0"
    ) from error

from ._mx_pairs import codes_of

BLOCK = 32
FP4 = formats.format_info_mxfp4_e2m1
FP8 = {"e4m3": formats.format_info_mxfp8_e4m3, "e5m2": formats.format_info_mxfp8_e5m2}


class GFloat:
    protocol = 1

    def describe(self) -> dict:
        computed = {"accumulate": "float64"}
        return {
            "name": "gfloat",
            "version": version("gfloat"),
            "url": "https://github.com/graphcore-research/gfloat",
            "formats": {"storage": "float64", **computed},
            "policies": {storage: {"storage": storage, **computed} for storage in ("float64", "float32", "bfloat16")},
            "choices": {"mx_scale_rule": "floor"},
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.fp8 = FP8[choices["mxfp8_element"]]

    def mxfp4(self, inputs, *, cotangents=None, forced=None) -> dict:
        return _encode(FP4, inputs["x"])

    def mxfp8(self, inputs, *, cotangents=None, forced=None) -> dict:
        return _encode(self.fp8, inputs["x"])

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        return _decode(FP4, inputs["scales"], codes_of(inputs))

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        return _decode(self.fp8, inputs["scales"], inputs["codes"])


def _encode(block_format, x) -> dict:
    rows = []
    for block in np.asarray(x, np.float64).reshape(-1, BLOCK):
        scale = compute_scale_amax(block_format.etype.emax, block)
        rows.append(list(encode_block(block_format, scale, block / scale)))
    rows = np.array(rows, np.uint8)  # [blocks, 1 + 32], the scale first
    shape = x.shape
    return {"scales": rows[:, 0].reshape(*shape[:-1], shape[-1] // BLOCK), "codes": rows[:, 1:].reshape(shape)}


def _decode(block_format, scales, codes) -> dict:
    rows = np.concatenate([scales.reshape(-1, 1), codes.reshape(-1, BLOCK)], 1)
    values = [list(decode_block(block_format, row.tolist())) for row in rows]
    return {"values": np.array(values).reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)}


adapter = GFloat()
