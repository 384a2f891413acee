"""Find the layers of a model that are equal to the layer before them: same ops, dtypes, shapes, casts and reasons."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autocastfx.report.view import Row, error_cell

_LEAST_SAVED = 3  # rows that are left out; of fewer, the line that stands for them is not worth its place
_WORD = re.compile(r"\w+(?:/\w+)*")


@dataclass(frozen=True)
class EqualLayers:
    """Layers that follow each other and are equal to one that stands before them.

    Attributes:
        module: the path of what holds the layers; empty for the root.
        shown: the number of the layer that stands for all.
        first, last: the numbers of the others.
        names: the rows of the others.
    """

    module: str
    shown: int
    first: int
    last: int
    names: frozenset[str]

    @property
    def says(self) -> str:
        """A line that stands for the others."""
        path = f"{self.module}." if self.module else ""
        one, count = self.first == self.last, self.last - self.first + 1
        others = f"layer {path}{self.first}" if one else f"layers {path}{self.first}-{self.last}"
        each = f"{len(self.names) // count:,} lines{'' if one else ' each'}"
        return f"{others} as {path}{self.shown}: {each}, with the same dtypes and reasons"


def equal_layers(rows: Sequence[Row], casts: Mapping[str, str], table: Sequence[Row]) -> list[EqualLayers]:
    """Return the layers that a table can leave out, outer ones first; those inside a layer left out are not told.

    A layer is a module whose name is a number. Two are equal if their rows are, one by one: ops, attributes, dtypes,
    shapes, precisions, reasons, casts, errors, and what they read, inside the layer and from outside.

    ``table`` has those rows of a graph that have a line, and ``casts`` what is said of the casts that a row reads, by
    its name.
    """
    known, members = {row.name: row for row in rows}, _members(table)
    words = _Words(known, casts)
    found, gone = list[EqualLayers](), set[str]()
    for module in sorted(members, key=lambda path: path.count(".") + bool(path)):
        for run in _runs({number: own for number, own in members[module].items() if own[0].name not in gone}):
            found += _equal(module, run, members[module], words)
            gone.update(name for one in found for name in one.names)
    return found


def _members(rows: Sequence[Row]) -> dict[str, dict[int, list[Row]]]:
    """Return the rows in each layer by the path of what holds the layer, and by the layer's number."""
    members: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    runners = {inner: row.module for row in rows for inner in row.runs}
    for row in rows:
        module = row.module if row.planned is not None else runners.get(row.name.rpartition("/")[0], "")
        parts = module.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                members[".".join(parts[:i])][int(part)].append(row)
    return members


def _runs(layers: Mapping[int, list[Row]]) -> Iterator[list[int]]:
    """Yield the numbers of layers that follow each other."""
    for _, run in groupby(enumerate(sorted(layers)), key=lambda place: place[1] - place[0]):
        yield [number for _, number in run]


def _equal(
    module: str, run: Sequence[int], layers: Mapping[int, Sequence[Row]], words: _Words
) -> Iterator[EqualLayers]:
    for _, equal in groupby(run, lambda number: words.of(f"{module}.{number}".removeprefix("."), layers[number])):
        shown, *others = equal
        names = frozenset(row.name for number in others for row in layers[number])
        if len(names) >= _LEAST_SAVED:
            yield EqualLayers(module, shown, others[0], others[-1], names)


class _Words:
    """Writes a layer in words that are the same for equal layers: names of nodes are replaced by their positions."""

    def __init__(self, known: Mapping[str, Row], casts: Mapping[str, str]) -> None:
        self._known, self._casts = known, casts

    def of(self, path: str, rows: Sequence[Row]) -> list[tuple[object, ...]]:
        """Return all that is said of the rows of the layer at ``path``, and how they read each other."""
        positions = {row.name: f"·{i}" for i, row in enumerate(rows)}

        def position(name: str) -> str:
            row = self._known[name]
            if row.kind in ("cast", "copy") and row.reads:
                return f"{row.dtype} of {position(row.reads[-1])}"
            if row.kind in ("parameter", "buffer") and f"{row.op}.".startswith(f"{path}."):
                return row.op.removeprefix(path)
            return positions.setdefault(name, f"outside {len(positions)}")

        reads = [tuple(map(position, row.reads)) for row in rows]

        def told(name: str, graph: str) -> str:
            found = next((one for one in (f"{graph}/{name}", name) if one in self._known), None)
            if found is None:
                return name
            return positions.get(found, self._known[found].op if self._known[found].kind == "op" else "outside")

        def plain(text: str, graph: str) -> str:
            return _WORD.sub(lambda word: told(word[0], graph), text.replace(f"{path}.", "·."))

        def said(row: Row) -> tuple[object, ...]:
            graph = row.name.rpartition("/")[0]
            attributes = tuple((name, plain(setting, graph)) for name, setting in row.attributes)
            because = plain(str(row.planned.placement.because), graph) if row.planned is not None else ""
            return (*self._row(row, path), because, plain(self._casts.get(row.name, ""), graph), attributes)

        return [(*said(row), read) for row, read in zip(rows, reads, strict=True)]

    def _row(self, row: Row, path: str) -> tuple[object, ...]:
        planned = row.planned
        if planned is None:
            return row.kind, row.dtype, row.shape, row.depth
        what = (row.kind, row.op, planned.module.removeprefix(path), row.dtype, row.shape, row.depth, row.is_own_cast)
        return (*what, row.precisions, str(row.decision), row.float8, error_cell(planned.error), len(row.low_reads))
