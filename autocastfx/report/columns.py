"""Lay out cells in columns that fit a width."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["LEAST_WIDTH", "Column", "aligned", "shortened", "wrapped"]

LEAST_WIDTH = 40
_GAP = "  "
_LEAST = 3  # one character, the ellipsis, and one character


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: its heading.
        paint: the kind of its cells, for colours; empty for none.
        from_end: too long cells lose their end, not their middle.
        weight: where columns are cut, a column of weight 2 keeps twice as much as one of weight 1.
        least: it keeps as much in any case.
    """

    title: str
    paint: str = ""
    from_end: bool = False
    weight: float = 1
    least: int = _LEAST


def aligned(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    painted: Callable[[str, str], str] = lambda text, _: text,
) -> list[str]:
    """Return a line of titles and a line for each row. Columns without any text are left out.

    Args:
        columns: the columns.
        rows: their cells. The last cell of a row that has fewer extends over the columns that the row lacks.
        width: shorten cells until no line is longer; None shortens nothing.
        painted: adds colours to a cell's text, which it may not change: of the text and the column's ``paint``.
    """
    kept = [i for i in range(len(columns)) if any(len(row) > i and row[i] for row in rows)] or [0]
    table = [[row[i] for i in kept if i < len(row)] for row in rows]
    shown = [columns[i] for i in kept]
    whole = [row if len(row) == len(shown) else row[:-1] for row in table]  # the last cell of the others extends
    natural = [max(len(c.title), *(len(row[i]) for row in whole if len(row) > i), 0) for i, c in enumerate(shown)]
    widths = natural if width is None else _fitting(natural, shown, width - len(_GAP) * (len(shown) - 1))
    lines = [_GAP.join(f"{shortened(c.title, w):<{w}}" for c, w in zip(shown, widths, strict=True)).rstrip()]
    return lines + [_line(row, shown, widths, width, painted) for row in table]


def _line(
    row: Sequence[str],
    columns: Sequence[Column],
    widths: Sequence[int],
    width: int | None,
    painted: Callable[[str, str], str],
) -> str:
    """Return the line of a row, with each cell shortened to its column; the last one may reach to the line's end."""
    last = max((i for i, cell in enumerate(row) if cell), default=-1)
    extends = len(row) < len(columns)
    line, used = "", 0
    for i, cell in enumerate(row[: last + 1]):
        room = widths[i] if i < last else len(cell) if width is None else width - used
        text = shortened(cell, room, from_end=columns[i].from_end or (i == last and extends))
        line += painted(text, columns[i].paint) + (" " * (widths[i] - len(text)) + _GAP if i < last else "")
        used += widths[i] + len(_GAP)
    return line


def _fitting(natural: Sequence[int], columns: Sequence[Column], room: int) -> list[int]:
    """Return widths whose sum is at most ``room``, where that can be: the largest are cut to one level."""
    for level in range(max(natural), _LEAST, -1):
        widths = [min(w, max(c.least, int(level * c.weight))) for w, c in zip(natural, columns, strict=True)]
        if sum(widths) <= room:
            break
    else:
        return [min(width, column.least) for width, column in zip(natural, columns, strict=True)]
    for i, width in enumerate(natural):  # what the level leaves over goes to the first that are cut
        extra = min(width - widths[i], room - sum(widths))
        widths[i] += min(extra, 1)
    return widths


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


def wrapped(text: str, width: int | None, indent: str) -> list[str]:
    """Return lines of prose of at most ``width`` characters, but for longer words; those after the first indented."""
    if width is None:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
