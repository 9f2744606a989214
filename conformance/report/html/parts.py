"""Small pieces of HTML that every section is made of."""

from itertools import groupby

from ..results import FAULTS
from ..text import rank
from .ratios import shade, short, slug, text


def tag(name: str, body: str, **attributes) -> str:
    """``body`` is HTML, attribute values are plain text."""
    told = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return f"<{name}{told}>{body}</{name}>"


def table(head: list[str], rows: list[list[str]], name: str) -> str:
    """Cells are HTML; the first of each row is its header. It scrolls sideways by itself, by keyboard too."""
    top = "".join(tag("th", text(h), scope="col") for h in head)
    body = "".join(f"<tr><th scope=row>{row[0]}</th>{''.join(f'<td>{c}</td>' for c in row[1:])}</tr>" for row in rows)
    whole = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=name)


def folded(summary: str, body: str, **attributes) -> str:
    """A part that opens on demand. ``summary`` is HTML."""
    return tag("details", f"<summary>{summary}</summary>{body}", **attributes)


def lines(entries: list[str], limit: int) -> str:
    """A list of plain sentences, cut at ``limit``."""
    shown = "".join(tag("li", text(entry)) for entry in entries[:limit])
    left = len(entries) - limit
    return f'<ul class="lines">{shown}{f"<li>and {left} more</li>" if left > 0 else ""}</ul>'


def command(line: str) -> str:
    """A shell command, with a button that copies it."""
    copy = '<button type="button" class="copy" hidden>Copy</button>'
    return f'<p class="command"><code tabindex="0">{text(line)}</code>{copy}</p>'


def number(ratio) -> str:
    """A ratio in digits, marked with its colour."""
    return f'<span class="n {shade(ratio)}">{text(short(ratio))}</span>'


def finding_anchor(check: dict) -> str:
    return slug("f", check["id"])


def grouped(checks: list[dict], *keys: str) -> list[tuple[tuple, list[dict]]]:
    """Groups by these keys, in the order in which they first appear."""
    key = lambda c: tuple(c[k] for k in keys)  # noqa: E731
    first: dict[tuple, int] = {}
    for check in checks:
        first.setdefault(key(check), len(first))
    ordered = sorted(checks, key=lambda c: first[key(c)])
    return [(k, list(group)) for k, group in groupby(ordered, key)]


def gravest(checks: list[dict]) -> dict:
    """Of several checks the one that a reader must see."""
    return max(checks, key=lambda c: (c["verdict"] in FAULTS, c["verdict"] == "undecided", rank(c["ratio"])))
