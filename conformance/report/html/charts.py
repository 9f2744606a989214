"""Charts as inline SVG: histograms of error/bound, and the growth of the free-running error beside its bound."""

from math import ceil, floor, isfinite, log10

from ...protocol.plain import number
from ..text import cell, rank
from .ratios import shade, text
from .tables import ran

LOW, HIGH, PER_DECADE = -4, 2, 4  # decades of the histogram, bins in each
BINS = (HIGH - LOW) * PER_DECADE
GRAPH = (228, 96)  # width, height
DIRECTIONS = {"forward": ("value", "decision"), "backward": ("cotangent",)}
LEVELS = "<p>How far below, or above, their bounds the errors lie. The line marks the bound; 0 means exact.</p>"
DRIFT = (
    "<p>The implementation's own run against the oracle's own run, decisions pinned: relative error in the 2-norm "
    "(line) and its propagated bound (dashed). Reported, not judged: the walk judges each step by itself.</p>"
)


def histograms(results: dict) -> str:
    """One for each policy and kind of check."""
    parts = []
    for policy in results["subject"]["policies"]:
        mine = [c for c in ran(results) if c["policy"] == policy]
        found = ((kind, [r for r in ratios if r is not None]) for kind, ratios in by_kind(mine).items())
        drawn = "".join(histogram(ratios, kind) for kind, ratios in found if ratios)
        if drawn:
            parts.append(f'<h3>{text(policy)}</h3><div class="charts">{drawn}</div>')
    return LEVELS + "".join(parts) if parts else ""


def by_kind(checks: list[dict]) -> dict[str, list]:
    """Ratios of the walk at every step, of parameter gradients, of stages by themselves, and end to end."""
    walked = [c for c in checks if c["kind"] == "trace"]
    kinds = {way: [r for c in walked if c["quantity"] in of for r in c["steps"]] for way, of in DIRECTIONS.items()}
    kinds["parameter gradients"] = [c["ratio"] for c in walked if c["quantity"] == "gradient"]
    kinds["stages by themselves"] = [c["ratio"] for c in checks if c["kind"] == "stage"]
    kinds["end to end"] = [c["ratio"] for c in checks if c["kind"] == "end_to_end"]
    return kinds


def growths(results: dict) -> str:
    drawn = "".join(
        growth(series, f"{stage}, {check['layout']} {check['policy']}")
        for check in ran(results)
        if check["case"] == "tame"
        for stage, series in check["extra"].get("growth", {}).items()
    )
    return f'{DRIFT}<div class="charts">{drawn}</div>' if drawn else ""


def histogram(ratios: list, title: str) -> str:
    """Bars over log10 of error/bound; exact zeros and what is beyond the axis have bars of their own."""
    counts = [0] * (BINS + 2)
    for ratio in ratios:
        counts[bin_of(rank(ratio))] += 1
    width, height = GRAPH
    bar, top = width / (BINS + 4), max(counts)
    bars = []
    for i, count in enumerate(counts):
        if count:
            tall = max(2.0, (height - 4) * count / top)
            x = bar * (i + (0 if i == 0 else 1 if i <= BINS else 2))
            place = f'x="{x:.1f}" y="{height - tall:.1f}" width="{bar - 1:.1f}" height="{tall:.1f}"'
            bars.append(f'<rect class="cell {shade(_middle(i))}" {place}><title>{_range(i)}: {count}</title></rect>')
    at_one = bar * (2 + -LOW * PER_DECADE)
    rule = f'<line class="limit" x1="{at_one:.1f}" x2="{at_one:.1f}" y1="0" y2="{height}"/>'
    ticks = "".join(
        f'<text x="{bar * (2 + (d - LOW) * PER_DECADE):.1f}" y="{height + 13}">{_power(d)}</text>'
        for d in range(LOW + 2, HIGH + 1, 2)
    )
    ends = f'<text x="{bar / 2:.1f}" y="{height + 13}">0</text>'
    beyond = sum(rank(r) > 1 for r in ratios)
    told = f"{title}: {len(ratios)} ratios, {beyond} above 1"
    axis = f'<line class="axis" x1="0" x2="{width}" y1="{height}" y2="{height}"/>'
    box = f"-6 -4 {width + 12} {height + 22}"
    return figure(
        title, f"{len(ratios)} ratios, {beyond} above 1", told, box, rule + axis + "".join(bars) + ticks + ends
    )


def figure(title: str, subtitle: str, told: str, box: str, body: str) -> str:
    caption = f"<figcaption>{text(title)} <small>{text(subtitle)}</small></figcaption>"
    drawing = f'<svg viewBox="{box}" role="img" aria-label="{text(told)}">{body}</svg>'
    return f'<figure class="chart">{caption}{drawing}</figure>'


def bin_of(value: float) -> int:
    """0 for exact zeros, then the bins, then one for what is beyond."""
    if value <= 0:
        return 0
    if not value <= 10**HIGH:
        return BINS + 1
    return 1 + min(max(floor((log10(value) - LOW) * PER_DECADE - 1e-9), 0), BINS - 1)


def _middle(i: int) -> float:
    return 0.0 if i == 0 else float("inf") if i > BINS else 10 ** (LOW + (i - 0.5) / PER_DECADE)


def _range(i: int) -> str:
    if i in (0, BINS + 1):
        return "exactly 0" if i == 0 else "above 100 or not finite"
    low, high = (cell(10 ** (LOW + j / PER_DECADE)) for j in (i - 1, i))
    return f"up to {high}" if i == 1 else f"{low} to {high}"


def _power(decade: int) -> str:
    return "1" if decade == 0 else "10" + "".join("⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".index(c)] for c in str(decade))


def growth(series: dict, title: str) -> str:
    """Error (line) and bound (dashed, with the room below it shaded) over the steps; logarithmic."""
    error, bound = ([number(v) for v in series[key]] for key in ("error", "bound"))
    seen = [v for v in (*error, *bound) if v is not None and isfinite(v) and v > 0]
    if not seen:
        return ""
    low, high = floor(log10(min(seen))), ceil(log10(max(seen)))
    high += low == high
    width, height = GRAPH
    x = lambda k: 26 + k * (width - 34) / max(len(error) - 1, 1)  # noqa: E731
    level = lambda v: min(max(log10(v) if v > 0 else low, low), high) if isfinite(v) else high  # noqa: E731
    y = lambda v: height - (level(v) - low) * height / (high - low)  # noqa: E731
    points = lambda values: " ".join(f"{x(k):.1f},{y(v):.1f}" for k, v in enumerate(values))  # noqa: E731
    over = [k for k, (e, b) in enumerate(zip(error, bound, strict=True)) if not e <= b]
    dots = "".join(
        f'<circle class="{"over" if k in over else "dot"}" cx="{x(k):.1f}" cy="{y(e):.1f}" r="3">'
        f"<title>step {k + 1}: error {e:.2g}, bound {bound[k]:.2g}</title></circle>"
        for k, e in enumerate(error)
    )
    room = f"{x(0):.1f},{height} {points(bound)} {x(len(bound) - 1):.1f},{height}"
    ticks = "".join(f'<text x="{x(k):.1f}" y="{height + 13}">{k + 1}</text>' for k in range(len(error)))
    scale = "".join(
        f'<text class="left" x="20" y="{height - (d - low) * height / (high - low) + 3:.1f}">{_power(d)}</text>'
        for d in sorted({low, high})
    )
    told = "above its bound at step " + ", ".join(str(k + 1) for k in over) if over else "below its bound at every step"
    axis = f'<line class="axis" x1="{x(0):.1f}" x2="{width}" y1="{height}" y2="{height}"/>'
    lines = f'<polyline class="bound" points="{points(bound)}"/><polyline class="error" points="{points(error)}"/>'
    body = f'<polygon class="room" points="{room}"/>{lines}{dots}{axis}{ticks}{scale}'
    return figure(title, told, f"{title}: {told}", f"-6 -6 {width + 12} {height + 24}", body)
