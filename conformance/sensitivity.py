"""The smallest fault that the walk still catches, by stage and policy.

An honest run of ``fast`` is recorded once; then a fault of relative size eps is put into one stage's recorded output and
eps is bisected until the comparison just alarms. Kinds: one element (the most sensitive one, and the median one), the
whole tensor scaled, and a constant added to every element, in units of the tensor's root mean square. Written as a
table in units of the declared unit roundoff: ``python -m conformance.sensitivity FILE.md``.
"""

import sys
from pathlib import Path

import numpy as np

from conformance import adapter
from conformance.cases import unroll_cases
from conformance.check_unroll import UnrollRun
from conformance.compare import BIAS_LIMIT, Bias, compare
from reference.bounds import Arithmetic

KINDS = ("element, best", "element, median", "whole tensor", "added constant")
SMALLEST, LARGEST = 1e-20, 1e3


def bisect(caught) -> float:
    """The smallest eps, to one per cent, for which ``caught(eps)``; infinity if none."""
    low, high = SMALLEST, LARGEST
    if not caught(high):
        return float("inf")
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high


def element_thresholds(actual, expected, point, formats, valid) -> np.ndarray:
    """For every compared element the relative change that brings its error to its bound."""
    comparison_bound = bound_of(expected, point, formats)
    keep = np.ones(expected.shape, bool) if valid is None else np.broadcast_to(
        valid.reshape(valid.shape + (1,) * (expected.ndim - valid.ndim)), expected.shape)  # fmt: skip
    keep = keep & (expected.value != 0)
    room = comparison_bound - np.abs(np.asarray(actual, float) - expected.value)
    return np.maximum(room[keep], 0) / np.abs(expected.value[keep])


def bound_of(expected, point, formats):
    from conformance.compare import allowance

    return allowance(expected, point, formats)


def tensor_threshold(entries: list, formats: dict, change) -> float:
    """The smallest eps for which ``change(actual, eps)`` in every step is seen by the comparison or the bias test."""

    def caught(eps: float) -> bool:
        pool = Bias.empty()
        for actual, expected, point, valid in entries:
            moved = change(np.asarray(actual, float), eps)
            if not compare("x", moved, expected, point, formats, valid).ok:
                return True
            pool.add(moved, expected, point, formats, valid)
        z = pool.z()
        return z is not None and not abs(z) <= BIAS_LIMIT

    return bisect(caught)


def scaled(actual, eps):
    return actual * (1 + eps)


def shifted(actual, eps):
    return actual + eps * np.sqrt(np.mean(np.square(actual)))


def thresholds(run: UnrollRun) -> dict[tuple[str, str], dict]:
    """(stage, quantity) -> kind -> smallest relative fault caught, in units of the declared roundoff."""
    groups: dict[tuple[str, str], list] = {}
    for (quantity, _, stage), entry in run.walk.compared.items():
        if quantity != "gradient" and entry[1].ndim > 0:
            groups.setdefault((stage, quantity), []).append(entry)
    table = {}
    for (stage, quantity), entries in groups.items():
        each = np.concatenate([element_thresholds(a, e, p, run.formats, v) for a, e, p, v in entries])
        if each.size == 0:
            continue
        found = {
            "element, best": float(each.min()),
            "element, median": float(np.median(each)),
            "whole tensor": tensor_threshold(entries, run.formats, scaled),
            "added constant": tensor_threshold(entries, run.formats, shifted),
        }
        u = Arithmetic(run.formats).at((1, stage)).unit_roundoff
        table[(stage, quantity)] = {kind: eps / u for kind, eps in found.items()}
    return table


def tables(seed: int = 0) -> dict[tuple[str, str], dict]:
    """The best case for each stage: the smallest threshold over the suite's cases. Keyed by (policy, layout)."""
    subject = adapter.Subject(adapter.load("fast"))
    found = {}
    for policy in subject.description.policies:
        for layout in subject.description.layouts:
            choices, best = subject.description.choices_for(layout), {}
            for case in unroll_cases():
                for key, row in thresholds(UnrollRun(subject, case, choices, policy, seed)).items():
                    old = best.setdefault(key, dict(row))
                    best[key] = {kind: min(old[kind], row[kind]) for kind in KINDS}
            found[(policy, layout)] = best
    subject.stop()
    return found


def markdown(found: dict) -> str:
    lines = [
        "# Sensitivity: the smallest relative fault that the walk catches",
        "",
        "In units of the unit roundoff of the stage's declared format (float64 1.1e-16, float32 6e-8, bfloat16 3.9e-3); generated "
        "by `make sensitivity` from honest runs of `fast` on the suite's cases. *element*: one element of one step changed, the most "
        "sensitive and the median one. *whole tensor*: all of it scaled, in every step. *added constant*: in units of its root mean "
        "square.",
    ]
    for (policy, layout), rows in found.items():
        lines += ["", f"## {policy}, {layout}", "", "| stage | quantity | " + " | ".join(KINDS) + " |"]
        lines.append("|" + " --- |" * (len(KINDS) + 2))
        for (stage, quantity), row in rows.items():
            lines.append(f"| {stage} | {quantity} | " + " | ".join(f"{row[kind]:.2g}" for kind in KINDS) + " |")
    return "\n".join(lines) + "\n"


def main(path: str) -> None:
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(markdown(tables()), encoding="utf-8")
    partial.replace(target)


if __name__ == "__main__":
    main(sys.argv[1])
