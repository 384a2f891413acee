"""The casts that each node of a graph reads, in words for the node's own line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autocastfx.report.row import Row

__all__ = ["FoldedCasts", "folded_casts", "is_folded", "reads_low"]

_HELD = ("parameter", "buffer", "constant", "sub-graph")
_FOLDED_KINDS = (*_HELD, "cast", "copy")


@dataclass(frozen=True)
class FoldedCasts:
    """The casts of a node, as the node's own line shows them.

    Attributes:
        words: the casts that it reads, such as ``x, weight → bfloat16``; in brackets those that a node above reads.
            Then the values that a float32 op reads in 16 bits.
        first: how many casts it reads before all others.
        reads: the values that it reads, without casts.
    """

    words: str
    first: int
    reads: tuple[str, ...]


def is_folded(row: Row, read: set[str]) -> bool:
    """True for a node that the lines of its readers tell of; ``read`` are the names that any node reads."""
    return row.kind in _FOLDED_KINDS and row.name in read


def folded_casts(rows: Sequence[Row]) -> dict[str, FoldedCasts]:
    """Return what each row reads, by the row's name."""
    known, seen = {row.name: row for row in rows}, set[str]()
    found: dict[str, FoldedCasts] = {}
    for row in (row for row in rows if row.kind not in _FOLDED_KINDS):
        casts = [known[name] for name in row.reads if known[name].kind in ("cast", "copy")]
        groups: dict[str, list[str]] = {}
        for cast in casts:
            name, to = _value(cast, row, known), _dtype(cast)
            groups.setdefault(to, []).append(f"({name})" if cast.name in seen else name)
        first = sum(cast.cast is not None and cast.name not in seen for cast in casts)
        seen.update(cast.name for cast in casts)
        reads = tuple(_read(known[name], row, known) for name in row.reads)
        words = [f"{', '.join(v)} → {to}" for to, v in groups.items()]
        words += [reads_low(row)] if row.low_reads else []
        found[row.name] = FoldedCasts("; ".join(words), first, reads)
    return found


def reads_low(row: Row) -> str:
    """Return what a float32 op reads in 16 bits, in words."""
    return f"reads {', '.join(row.low_reads)} in 16 bits"


def _dtype(cast: Row) -> str:
    if cast.copy is not None:
        return f"{cast.copy.dtype} (working copy)"
    return (cast.cast.dtype + (" (saturating)" if cast.cast.saturates else "")) if cast.cast is not None else ""


def _value(cast: Row, reader: Row, known: dict[str, Row]) -> str:
    """The name of the value that is cast: of a parameter the path inside the reader's module."""
    value = cast.cast.value if cast.cast is not None else cast.copy.parameter if cast.copy is not None else ""
    held = known.get(value)
    path = held.op if held is not None and held.kind in _HELD else value.rpartition("/")[2]
    module = f"{reader.planned.module}." if reader.planned is not None else ""
    return path.removeprefix(module) if module != "." else path


def _read(read: Row, reader: Row, known: dict[str, Row]) -> str:
    if read.kind in ("cast", "copy"):
        return f"{_value(read, reader, known)} → {_dtype(read)}"
    return read.name
