"""Building blocks of the HTML that notebooks show: collapsible sections and tables, without scripts.

Everything that is put in is escaped. Colours are those of the surrounding page, so dark pages stay dark. Sizes are
bounded: long texts and tables say how much is left out. What can't be read is shown as an error in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

MAX_ROWS = 40  # of a table
MAX_TEXT = 200  # characters of a value
_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
_MAX_LINE = 500  # characters of a title or a summary

_STYLE = """
.trajstore-r{font-size:13px;line-height:1.45;color:inherit;max-width:900px;overflow-x:auto}
.trajstore-r .tj-h{border-bottom:1px solid rgba(128,128,128,.4);padding:2px 0 4px;margin-bottom:4px}
.trajstore-r .tj-k{opacity:.7}
.trajstore-r .tj-t{font-weight:600;overflow-wrap:anywhere}
.trajstore-r details{margin:1px 0}
.trajstore-r summary{cursor:pointer;padding:1px 0}
.trajstore-r summary b{display:inline-block;min-width:8em;font-weight:600}
.trajstore-r .tj-b{margin:2px 0 6px 1.2em}
.trajstore-r table{border-collapse:collapse;border:none;margin:0;font-size:12px;color:inherit;background:none}
.trajstore-r tr{background:none!important}
.trajstore-r th,.trajstore-r td{text-align:left;padding:1px 14px 1px 0;border:none;vertical-align:top;color:inherit;
white-space:pre-wrap;overflow-wrap:break-word;max-width:34em}
.trajstore-r th{font-weight:400;opacity:.7}
.trajstore-r thead th,.trajstore-r .tj-n{white-space:nowrap}
.trajstore-r .tj-n{text-align:right;font-variant-numeric:tabular-nums}
.trajstore-r .tj-e{border-left:3px solid #d9480f;padding-left:8px;margin:2px 0;overflow-wrap:anywhere}
""".replace("\n", "")


@dataclass(frozen=True, slots=True)
class Section:
    """A part that can be folded.

    Attributes:
        title: What it is about.
        summary: What is shown while it is folded, as plain text.
        body: HTML that the functions of this module made; empty: there is nothing to unfold.
        is_open: Whether it is shown unfolded.
    """

    title: str
    summary: str = ""
    body: str = ""
    is_open: bool = False

    def to_html(self) -> str:
        head = f"<b>{text(self.title)}</b> {text(self.summary, _MAX_LINE)}"
        if not self.body:
            return f"<div class='tj-b'>{head}</div>"
        is_open = " open" if self.is_open else ""
        return f"<details{is_open}><summary>{head}</summary><div class='tj-b'>{self.body}</div></details>"


def representation(
    kind: str, title: object, summary: Callable[[], str], sections: Iterable[Callable[[], Section]]
) -> str:
    """The HTML of an object. Never raises: what can't be found out is shown as an error.

    Args:
        kind: Name of the class.
        title: What names this object, such as its URL.
        summary: Makes one line about it.
        sections: Each makes a section.
    """
    try:
        line = text(summary(), _MAX_LINE)
    except Exception as error:
        line = problem(error)
    parts = "".join(_section(make) for make in sections)
    head = f"<span class='tj-k'>{text(kind)}</span> <span class='tj-t'>{text(title, _MAX_LINE)}</span>"
    top = f"<style>{_STYLE}</style><div class='tj-h'>{head}<div>{line}</div></div>"
    return f"<div class='trajstore-r'>{top}{parts}</div>"


def _section(make: Callable[[], Section]) -> str:
    try:
        return make().to_html()
    except Exception as error:
        return problem(error)


def problem(error: BaseException) -> str:
    """An error, shown where its value would be."""
    return f"<div class='tj-e'>{text(type(error).__name__)}: {text(error, _MAX_LINE)}</div>"


def text(value: object, most: int = MAX_TEXT) -> str:
    """Escaped text of at most this many characters, without control characters."""
    shown = str(value)
    if len(shown) > most:
        shown = f"{shown[:most]}… ({len(shown):,} characters)"
    printable = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return printable.translate(_ESCAPED)


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """A table of names and values; pairs whose value is None are left out."""
    shown = [(name, value) for name, value in pairs if value is not None]
    rows = [f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in shown[:MAX_ROWS]]
    return f"<table><tbody>{''.join(rows)}</tbody></table>{_left_out(len(shown) - len(rows))}"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], n_rows: int | None = None) -> str:
    """A table with headings, of at most `MAX_ROWS` rows.

    Args:
        headings: ``>`` before a heading aligns its column right.
        rows: The cells.
        n_rows: Number of all rows, if ``rows`` are only some of them.
    """
    classes = [" class='tj-n'" if heading.startswith(">") else "" for heading in headings]
    cells = (f"<th{c}>{text(h.lstrip('>'))}</th>" for c, h in zip(classes, headings, strict=True))
    lines = [
        "".join(f"<td{c}>{text(cell)}</td>" for c, cell in zip(classes, row, strict=True))
        for row in rows[:MAX_ROWS]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    left_out = (len(rows) if n_rows is None else n_rows) - len(lines)
    return f"<table><thead><tr>{''.join(cells)}</tr></thead><tbody>{body}</tbody></table>{_left_out(left_out)}"


def _left_out(n: int) -> str:
    return f"<div class='tj-k'>… and {n:,} more</div>" if n > 0 else ""


def count(n: int, noun: str) -> str:
    """A number and its noun, such as ``1 step`` or ``2,000 steps``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def size(n: float) -> str:
    """A number of bytes, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def moment(seconds: float) -> str:
    """A UNIX time as date and minute in UTC, and how long ago that is."""
    try:
        shown = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError, TypeError):
        return "?"
    age = time.time() - seconds
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if age >= 2 * length:
            return f"{shown}, {age / length:.0f} {unit} ago"
    return shown
