"""MXFP4 codes two in a byte, the even one low, as the suite hands them over and packages store them. NumPy only."""

import numpy as np


def apart(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., n] -> codes uint8 [..., 2n]."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def packed_of(inputs) -> np.ndarray:
    """The inputs of ``mxfp4_decode`` as pairs, whether they came as ``packed`` or as ``codes``."""
    codes = inputs.get("codes")
    return inputs["packed"] if "packed" in inputs else codes[..., ::2] | codes[..., 1::2] << 4


def codes_of(inputs) -> np.ndarray:
    """The same one code a byte."""
    return apart(inputs["packed"]) if "packed" in inputs else inputs["codes"]
