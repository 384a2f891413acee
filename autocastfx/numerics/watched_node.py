"""The rows of a watch, and its report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autocastfx.numerics.overflow import Overflow

__all__ = ["SkippedStep", "WatchedNode", "report"]


@dataclass(frozen=True)
class WatchedNode:
    """The values of a node in all observed calls.

    Attributes:
        name, op, module: the node's, as in the plan. The op of a cast that the conversion inserted is ``cast``, and its
            module that of its first reader.
        dtype: of its values.
        elements: the number of elements that were counted.
        overflow: the number that were Inf or NaN.
        underflow: of a cast, the number that became subnormal or zero in ``dtype`` and were not zero before; of any
            other node, the number that were subnormal, because a zero may be meant.
        largest: the largest finite magnitude.
        first_overflow: the first step at which the node was seen to overflow, in an observed call or when a skipped
            step was searched; None if it was not.
    """

    name: str
    op: str
    module: str
    dtype: str
    elements: int
    overflow: int
    underflow: int
    largest: float
    first_overflow: int | None


@dataclass(frozen=True)
class SkippedStep:
    """A step that the optimizer skipped.

    Attributes:
        step: its number, from 1.
        found: the node that overflowed when its batch ran again, with a rule that mends it; None if every value of the
            forward pass was finite, so that the loss or a gradient overflowed.
    """

    step: int
    found: Overflow | None


def report(
    rows: Sequence[WatchedNode], skipped: Sequence[SkippedStep], steps: int, observed: int, every: int, most: int
) -> str:
    """Write what a watch has seen.

    Args:
        rows: of the nodes, in graph order.
        skipped: in order.
        steps: the number of steps, the present one included.
        observed: the number of steps that were observed.
        every: the distance of observed steps.
        most: the number of nodes to show.
    """
    lines = [f"{steps} steps, {observed} of them observed (1 in {every}), {len(skipped)} skipped"]
    ranked = sorted(rows, key=lambda row: (row.first_overflow or steps + 1, -row.underflow / row.elements))
    cells = [("node", "op", "module", "dtype", "elements", "overflow", "underflow", "largest", "first overflow")]
    cells += [_cells(row) for row in ranked[:most]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells if rows else ():
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(ranked) > most:
        lines.append(f"{len(ranked) - most} more nodes")
    return "\n".join([*lines, *_of_skipped(skipped)])


def _cells(row: WatchedNode) -> tuple[str, ...]:
    counts = [f"{count:,}" if count else "-" for count in (row.elements, row.overflow, row.underflow)]
    first = f"step {row.first_overflow}" if row.first_overflow is not None else "-"
    return row.name, row.op, row.module or "(root)", row.dtype, *counts, f"{row.largest:.4g}", first


def _of_skipped(skipped: Sequence[SkippedStep]) -> Iterator[str]:
    causes: dict[str, list[SkippedStep]] = {}
    for one in skipped:
        causes.setdefault(one.found.name if one.found is not None else "", []).append(one)
    for alike in causes.values():
        numbers = ", ".join(str(one.step) for one in alike[:5]) + (", ..." if len(alike) > 5 else "")
        steps = f"step {numbers} was" if len(alike) == 1 else f"{len(alike)} steps ({numbers}) were"
        yield ""
        if alike[0].found is None:
            yield f"{steps} skipped though every value of the forward pass is finite: the loss or a gradient overflowed"
        else:
            yield f"{steps} skipped, because"
            yield str(alike[0].found)
