"""Values in JSON's types, and back."""

import math


def plain(value):
    """``value`` in JSON's own types: NumPy scalars and arrays unpacked, numbers that are not finite as strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def number(value) -> float | None:
    """A ratio as ``plain`` wrote it, as a number again."""
    return float(value) if isinstance(value, str) else value
