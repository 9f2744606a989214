"""How a ratio error/bound looks: its class of colour, the same on boxes, strips, tables and charts."""

from html import escape

from ..text import cell, rank

#: Upper limits of the classes, best first. Beyond the bound (1) a cell is also outlined, not coloured only.
CLASSES = (("r0", 0.0), ("r1", 0.1), ("r2", 0.5), ("r3", 1.0), ("r4", 10.0), ("r5", 1e3), ("r6", float("inf")))
LEGEND = (
    ("r0", "exact"), ("r1", "to 0.1"), ("r2", "to 0.5"), ("r3", "to 1, the bound"), ("r4", "to 10"), ("r5", "to 1000"),
    ("r6", "beyond, or not finite"), ("rn", "not recorded"),
)  # fmt: skip


def shade(ratio) -> str:
    """The class of a ratio as the results hold it."""
    if ratio is None:
        return "rn"
    return next(name for name, limit in CLASSES if rank(ratio) <= limit)


def worst(ratios: list):
    """The largest; None if there is none."""
    return max((r for r in ratios if r is not None), key=rank, default=None)


def by_step(checks: list[dict], steps: int) -> list:
    """The worst ratio of these checks at each step."""
    return [worst([check["steps"][k] for check in checks if k < len(check["steps"])]) for k in range(steps)]


def text(value) -> str:
    """Escaped for HTML."""
    return escape(str(value), quote=True)


def legend() -> str:
    keys = "".join(f'<li><span class="swatch {name}"></span>{text(label)}</li>' for name, label in LEGEND)
    return f'<ul class="legend" aria-label="colours: error over bound">{keys}</ul>'


def slug(*parts) -> str:
    """An id for anchors."""
    return "-".join("".join(c if c.isalnum() else "_" for c in str(part)) for part in parts)


def short(ratio) -> str:
    """A ratio as a box has room for it."""
    value = cell(ratio)
    return value.replace("e+0", "e").replace("e+", "e")
