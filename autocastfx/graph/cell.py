"""Tables: as lines of text, and as what a notebook's cell shows, HTML in which nothing of a name is markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_LEFT = ' style="text-align: left"'


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, in which columns begin at the same places; all rows have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shortened(text: str, room: int, *, from_end: bool = False) -> str:
    """Return ``text``, or as much of it as there is ``room`` for, with an ellipsis for what is left out.

    Args:
        text: one line.
        room: the most characters, at least 1.
        from_end: leave out the end, not the middle.
    """
    if len(text) <= room:
        return text
    tail = 0 if from_end else (room - 1) // 2
    return f"{text[: room - 1 - tail]}…{text[len(text) - tail :]}"


def preformatted(text: str) -> str:
    """Return text whose lines and columns stay as they are."""
    return f"<pre>{escape(text)}</pre>"


def table(above: Sequence[str], rows: Sequence[Sequence[str]], *, most: int, below: str) -> str:
    """Return lines of text with a table under them.

    Args:
        above: the lines.
        rows: of the table, the first of which has its titles; without rows there is no table.
        most: the number of rows to show, besides the titles.
        below: says where the other rows are, behind their number, if there are any.
    """
    lines = "<br>".join(escape(line) for line in above)
    if not rows:
        return f"<p>{lines}</p>"
    cells = [_row("th", rows[0]), *(_row("td", row) for row in rows[1 : most + 1])]
    left = len(rows) - 1 - most
    more = f"<p>{left} more {'rows' if left > 1 else 'row'}: {escape(below)}</p>" if left > 0 else ""
    return f"<p>{lines}</p><table>{''.join(cells)}</table>{more}"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}{_LEFT}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
