"""Render a converted graph as an aligned table: one line per node, with its decision and placement."""

from __future__ import annotations

from collections.abc import Sequence

from autocastfx.plan.plan import Precision
from autocastfx.report.row import Row
from autocastfx.report.summary import summary
from autocastfx.report.view import View

__all__ = ["render_text"]

_TITLES = ("  name", "op", "module", "dtype", "runs", "category", "placed because", "reason (source)")
_LEGEND = "first column: + made by the conversion, - in the captured graph only, * the model's own cast"
_MARKS = {"cast": "+", "made": "+", "copy": "+", "removed": "-"}
_MOST_READERS = 4


def render_text(view: View) -> str:
    """Render the header, a line of column titles, and a line for each node.

    An op without float32 values has no category and reason. Nodes of a sub-graph are indented below the node that runs
    it.
    """
    rows = [_TITLES, *(_cells(row) for row in view.rows)]
    lines = (*summary(view), _LEGEND, "", *_aligned(rows))
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    mark = _MARKS.get(row.kind, "*" if row.is_own_cast else " ")
    name = f"{mark} {'  ' * row.depth}{row.name}"
    if row.cast is not None:
        saturates = ", saturating" if row.cast.saturates else ""
        return name, "cast", "", row.dtype, f"of {row.cast.value} for {_listed(row.cast.readers)}{saturates}"
    if row.copy is not None:
        return name, "working copy", "", row.dtype, f"of {row.copy.parameter} for {_listed(row.copy.readers)}"
    if row.mark is not None:
        return name, row.op, "", row.dtype, f"for {row.mark.value}, by {row.mark.made_by} ({row.mark.rule})"
    if row.kind == "output":
        return name, "output", "", "", f"of {_listed(row.reads, most=len(row.reads))}" if row.reads else "of nothing"
    if row.kind not in ("op", "removed"):
        return name, row.kind, row.op, row.dtype
    if row.planned is None or row.decision is None:
        return name, row.op, "", "", "not in the plan"
    planned, placement, decision = row.planned, row.planned.placement, row.decision
    cells = (name, row.op, planned.module or "(root)", row.dtype)
    if placement.run is Precision.CAPTURED:
        return *cells, "captured"
    why = f"{decision.reason} ({decision.source})".lstrip()
    return *cells, row.precisions, str(decision.category), str(placement.because), why


def _listed(names: Sequence[str], most: int = _MOST_READERS) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "") or "nothing"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align columns to their widest cell. The last cell of a row may extend over the columns that the row lacks."""
    widths = [max((len(r[i]) for r in rows if len(r) > i + 1), default=0) for i in range(len(_TITLES))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)).rstrip() for row in rows]
