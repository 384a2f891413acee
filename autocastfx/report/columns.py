"""Lay out cells in columns that fit a width."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autocastfx.graph.cell import shortened

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
        is_path: its cells are paths of modules, which keep the numbers of layers. Where that is too much for the width
            of a line, they are shortened like others.
    """

    title: str
    paint: str = ""
    from_end: bool = False
    weight: float = 1
    least: int = _LEAST
    is_path: bool = False

    def shortened(self, text: str, room: int) -> str:
        """Return a cell's text, or as much of it as there is room for."""
        if self.is_path and len(text) > room:
            return _shorter_path(text, room)
        return shortened(text, room, from_end=self.from_end)

    def needs(self, cells: Sequence[str]) -> int:
        """Return the least width of a column that has these cells."""
        return max((len(_shortest_path(cell)) for cell in cells), default=0) if self.is_path else self.least


def aligned(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    painted: Callable[[str, str], str] = lambda text, _: text,
) -> list[str]:
    """Return a line of titles and a line for each row. Columns without any text are left out.

    The last cell of a row that has fewer extends over the columns that the row lacks. Cells are shortened until no line
    is longer than ``width``. ``painted`` adds colours to a cell's text, which it may not change: of the text and the
    column's ``paint``.
    """
    kept = [i for i in range(len(columns)) if any(len(row) > i and row[i] for row in rows)] or [0]
    table = [[row[i] for i in kept if i < len(row)] for row in rows]
    shown = [columns[i] for i in kept]
    whole = [row if len(row) == len(shown) else row[:-1] for row in table]  # the last cell of the others extends
    natural = [max(len(c.title), *(len(row[i]) for row in whole if len(row) > i), 0) for i, c in enumerate(shown)]
    widths = natural
    if width is not None:
        leasts = [max(c.needs([row[i] for row in whole if len(row) > i]), c.least) for i, c in enumerate(shown)]
        widths = _fitting(natural, shown, leasts, width - len(_GAP) * (len(shown) - 1))
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
        is_prose = i == last and extends
        text = shortened(cell, room, from_end=True) if is_prose else columns[i].shortened(cell, room)
        line += painted(text, columns[i].paint) + (" " * (widths[i] - len(text)) + _GAP if i < last else "")
        used += widths[i] + len(_GAP)
    return line


def _fitting(natural: Sequence[int], columns: Sequence[Column], leasts: Sequence[int], room: int) -> list[int]:
    """Return widths whose sum is at most ``room``, where that can be: the largest are cut to one level."""
    shortest = [column.least for column in columns]
    cuts = (
        [min(width, max(least, int(level * c.weight))) for width, least, c in zip(natural, kept, columns, strict=True)]
        for kept in (leasts, shortest)
        for level in range(max(natural), _LEAST, -1)
    )
    widths = next((cut for cut in cuts if sum(cut) <= room), None)
    if widths is None:
        return list(map(min, natural, shortest))
    for i, width in enumerate(natural):  # what the level leaves over goes to the first that are cut
        extra = min(width - widths[i], room - sum(widths))
        widths[i] += min(extra, 1)
    return widths


def _shorter_path(path: str, room: int) -> str:
    """Shorten a module's path to ``room``: layers' numbers stay, then the last name, then the names before it."""
    shortest = _shortest_path(path)
    if len(shortest) > room:
        return shortened(path, room)
    parts = path.split(".")
    kept = [part.isdecimal() for part in parts]
    for i in [len(parts) - 1, *range(len(parts) - 1)]:
        tried = [one or at == i for at, one in enumerate(kept)]
        if len(_elided(parts, tried)) <= room:
            kept = tried
    if not kept[-1]:  # as much of the last name as there is room for
        spare = room - len(shortest) + 1
        return f"{shortest[:-1]}{shortened(parts[-1], spare)}" if spare > 1 else shortest
    return _elided(parts, kept)


def _shortest_path(path: str) -> str:
    """Return the numbers of the layers in a path, with an ellipsis for the names."""
    parts = path.split(".")
    return _elided(parts, [part.isdecimal() for part in parts])


def _elided(parts: Sequence[str], kept: Sequence[bool]) -> str:
    """Return a path with an ellipsis for each run of names that are not kept."""
    shown = [part if keeps else "…" for part, keeps in zip(parts, kept, strict=True)]
    return ".".join(one for i, one in enumerate(shown) if one != "…" or i == 0 or shown[i - 1] != "…")


def wrapped(text: str, width: int | None, indent: str) -> list[str]:
    """Return lines of prose of at most ``width`` characters, but for longer words; those after the first indented."""
    if width is None:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
