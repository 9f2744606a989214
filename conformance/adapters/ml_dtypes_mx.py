"""ml_dtypes' element types and E8M0, as ``mxfp4_decode`` and ``mxfp8_decode``: a block is the product of the two.

The package has types and casts but no blocks, so there is nothing that finds a scale: the quantisers are not offered.

Install: ``make matrix PACKAGES=ml-dtypes`` and add ``--adapter-python .venvs/ml-dtypes``. Needs NumPy, no torch.
"""

from importlib.metadata import version

import numpy as np

try:
    import ml_dtypes
except ImportError as error:
    raise ImportError(
        f"The adapter ml_dtypes_mx needs the package ml-dtypes ({error}). Install it with "
        "`make matrix PACKAGES=ml-dtypes` and add `--adapter-python .venvs/ml-dtypes`"
    ) from error

from ._mx_pairs import codes_of

BLOCK = 32
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


class MLDtypes:
    protocol = 1

    def describe(self) -> dict:
        return {
            "name": "ml_dtypes",
            "version": version("ml_dtypes"),
            "url": "https://github.com/jax-ml/ml_dtypes",
            "formats": {"storage": "float64"},
            "choices": {},
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.fp8 = FP8[choices["mxfp8_element"]]

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        return _decode(codes_of(inputs).view(ml_dtypes.float4_e2m1fn), inputs["scales"])

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        return _decode(inputs["codes"].view(self.fp8), inputs["scales"])


def _decode(elements, scales) -> dict:
    elements = elements.astype(np.float64).reshape(*scales.shape, BLOCK)
    values = elements * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[..., None]
    return {"values": values.reshape(*scales.shape[:-1], -1)}


adapter = MLDtypes()
