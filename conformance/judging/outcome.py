"""From comparisons to the outcome of a check: one verdict, the worst element, and a sentence."""

from pathlib import Path

import numpy as np

from .bias import BIAS_LIMIT, Bias
from .compare import Comparison
from .decisions import Decisions, Illegal
from .operands import listed

UNDECIDED_WIDTH = 0.1  # a bound wider than a tenth of the quantity (2-norm) decides nothing


def outcome(verdict: str, **fields) -> dict:
    """A check's outcome in the shape of results.schema.json."""
    empty = {
        "verdict": verdict, "ratio": None, "steps": [], "worst": None, "bias": None, "compared": 0,
        "decisions": None, "first_step": None, "message": "",
    }  # fmt: skip
    return empty | fields


def not_offered(message: str) -> dict:
    return outcome("not offered", message=message)


def failed(message: str, **fields) -> dict:
    return outcome("fail", message=message, **fields)


def of_comparison(what: str, comparison: Comparison, bias: Bias | None = None, width: float | None = None) -> dict:
    """One array compared once. ``width``: the relative bound, of a check that may be undecided."""
    fields = {"ratio": comparison.ratio, "compared": comparison.compared, "worst": comparison.worst()}
    z = None if bias is None else bias.z()
    fields["bias"] = None if z is None else abs(z)
    if not comparison.ok:
        return failed(exceeds(what, comparison), **fields)
    if z is not None and not abs(z) <= BIAS_LIMIT:
        return failed(
            f"{what}: its errors lean one way by {abs(z):.3g} standard errors, limit {BIAS_LIMIT:.2f}", **fields
        )
    if width is not None and not width <= UNDECIDED_WIDTH:
        message = f"{what}: within its bound, but the bound is {width:.2g} of the quantity; nothing is decided"
        return outcome("undecided", message=message, **fields) | {"width": width}
    return outcome("pass", **fields) | ({} if width is None else {"width": width})


def with_operands(found: dict, make) -> dict:
    """A failing outcome with the operands of its worst element: ``make(index)`` lists them."""
    if found["verdict"] == "fail" and found["worst"] and "operands" not in found["worst"]:
        found["worst"]["operands"] = listed(make, tuple(found["worst"]["index"]))
    return found


def worse(a: dict, b: dict) -> dict:
    """Of two outcomes of one check the graver one, with both counts."""
    gravity = ("pass", "not offered", "undecided", "fail", "error")
    key = lambda o: (gravity.index(o["verdict"]), o["ratio"] or 0.0)  # noqa: E731
    return max(a, b, key=key) | {"compared": a["compared"] + b["compared"]}


def exceeds(what: str, comparison: Comparison) -> str:
    where = ", ".join(map(str, map(int, comparison.index)))
    return (
        f"{what}[{where}] is {comparison.actual:.9g}, expected {comparison.expected:.9g}: "
        f"error {comparison.ratio:.4g} x its bound {comparison.bound:.3g}"
    )


def of_decisions(what: str, decisions: Decisions, illegal: Illegal | None = None) -> dict:
    """``illegal`` is the first of those that rounding does not allow."""
    fields = {"decisions": decisions.to_dict(), "compared": decisions.total}
    if decisions.illegal:
        message = f"{what}: {decisions.illegal} of {decisions.total} differ beyond what rounding allows"
        told = f"; {illegal.message}" if illegal else ""
        return failed(message + told, **of_illegal(illegal), **fields)
    return outcome("pass", ratio=0.0, **fields)


def of_illegal(illegal: Illegal | None, step: int | None = None) -> dict:
    """The fields ``ratio`` and ``worst`` of an illegal choice."""
    if illegal is None or illegal.comparison is None:
        return {"ratio": float("inf")}
    return {"ratio": illegal.comparison.ratio, "worst": illegal.comparison.worst(step) | {"operands": illegal.operands}}


def of_equality(what: str, actual, expected, ignore=None) -> dict:
    """Exact values: integers, booleans, or floats bit for bit (NaN equals NaN, -0 differs from 0)."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return failed(f"{what} has shape {actual.shape}; wanted {expected.shape}")
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    if expected.dtype.kind == "f":
        same &= (np.signbit(actual) == np.signbit(expected)) | (expected != expected)
    if ignore is not None:
        same |= ignore
    if same.all():
        return outcome("pass", ratio=0.0, compared=int(same.size))
    index = tuple(map(int, np.argwhere(~same)[0]))
    message = (
        f"{what}{list(index)} is {actual[index]!r}, expected {expected[index]!r}; "
        f"{int((~same).sum())} of {same.size} differ"
    )
    worst = Comparison(float("inf"), same.size, index, float(actual[index]), float(expected[index]), 0.0).worst()
    return failed(message, ratio=float("inf"), compared=int(same.size), worst=worst)


def dump(folder, check_id: str, arrays: dict) -> None:
    """Save a failing check's arrays as ``<id>.npz``, written whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in check_id)
    partial = folder / f".{name}.partial.npz"
    np.savez(partial, **{key.replace("/", "__"): np.asarray(value) for key, value in arrays.items()})
    partial.rename(folder / f"{name}.npz")
