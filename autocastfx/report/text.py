"""Render a converted graph as an aligned table: one line per op or per node, with its decision and placement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autocastfx.plan.plan import Decision, Precision, Why
from autocastfx.report.columns import Column, aligned, wrapped
from autocastfx.report.counts import counted
from autocastfx.report.folded_casts import FoldedCasts, folded_casts, is_folded, reads_low
from autocastfx.report.predicted_error import error_cell
from autocastfx.report.row import Row
from autocastfx.report.row_filter import selected
from autocastfx.report.summary import summary
from autocastfx.report.text_options import TextOptions
from autocastfx.report.view import View

__all__ = ["render_text"]

_LEGEND = {"+": "made by the conversion", "-": "in the captured graph only", "*": "the model's own cast"}
_WHY = Column("why", from_end=True, least=10)  # a category and the number of its reason
_ERROR = Column("error")
_PLACE = (Column("module", weight=1.5), Column("dtype"), Column("shape", weight=1.2), Column("runs", "runs"))
_FOLDED = (Column("  name (op)", "mark", weight=1.5), *_PLACE, Column("casts", from_end=True), _ERROR, _WHY)
_FULL = (Column("  name", "mark", weight=1.5), Column("op"), *_PLACE, _ERROR, _WHY)
_MARKS = {"cast": "+", "made": "+", "copy": "+", "removed": "-"}
_MOST_READERS = 4
_COLOURS = {"low": "32", "float32": "33", "captured": "2", "given": "2", "+": "32", "-": "31", "*": "35"}
_SYMBOL = re.compile(r"(?:\[|, )([a-z]+\d+)=(\d+)")
_DEFAULT = TextOptions()


def render_text(view: View, options: TextOptions = _DEFAULT) -> str:
    """Render the header, a table, and the reasons that the table's last column refers to by number.

    An op without float32 values has no category and reason. Nodes of a sub-graph are indented below the node that runs
    it.
    """
    shown, casts = selected(view.rows, options.only, options.module), folded_casts(view.rows)
    head, notes = [*summary(view), *_selection(view, shown, options)], _Notes()
    if options.summary:
        tables = counted(shown, casts, options.width)
    else:
        if options.full:
            columns, cells = _FULL, [_full_cells(row, notes) for row in _with_operands(view.rows, shown)]
        else:
            read = {name for row in view.rows for name in row.reads}
            lines = [row for row in shown if not is_folded(row, read)]
            columns, cells = _FOLDED, [_folded_cells(row, casts.get(row.name), notes) for row in lines]
        tables = [aligned(columns, cells, options.width, *([_painted] if options.colour else []))]
        head += _legends(view.rows, cells)
    prose = [line for text in head for line in wrapped(text, options.width, "  ")]
    blocks = (prose, *(tables if shown else [["no node fits"]]), notes.lines(options.width))
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _legends(rows: Sequence[Row], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each thing in the table that does not explain itself."""
    marks = [f"{mark} {words}" for mark, words in _LEGEND.items() if any(line[0][0] == mark for line in cells)]
    if marks:
        yield f"first column: {', '.join(marks)}"
    if any(cell.startswith("(") and "→" in cell for line in cells for cell in line):
        yield "casts in brackets: those that an op above reads too"
    if any("[" in line[-1] for line in cells):
        yield "why: category and [reason], then what placed it, if that is not the category or the fewest bytes moved"
    if any(row.planned is not None and row.planned.error is not None for row in rows):
        yield "error: what the 16 bits of this node, or of what it reads, are predicted to change"
    found = dict(pair for row in rows for pair in _SYMBOL.findall(row.shape))
    if found:
        known = ", ".join(f"{name}={size}" for name, size in sorted(found.items()))
        yield f"sizes that may differ from call to call: {known} in the example inputs"


def _selection(view: View, shown: Sequence[Row], options: TextOptions) -> Iterator[str]:
    """A line that says which nodes are shown, if not all are."""
    words = [*([f"only {options.only}"] if options.only else []), *([f"in {options.module}"] if options.module else [])]
    if words:
        planned = sum(row.planned is not None for row in view.rows)
        yield f"shown: {sum(row.planned is not None for row in shown)} of {planned} nodes, {', '.join(words)}"


def _with_operands(rows: Sequence[Row], shown: Sequence[Row]) -> list[Row]:
    """The rows shown, and the casts, parameters and the like that they read."""
    known = {row.name: row for row in rows}
    kept, left = {row.name for row in shown}, [name for row in shown for name in row.reads]
    while left:
        row = known[left.pop()]
        if row.name not in kept and is_folded(row, {row.name}):
            kept.add(row.name)
            left += row.reads
    return [row for row in rows if row.name in kept]


def _folded_cells(row: Row, casts: FoldedCasts | None, notes: _Notes) -> tuple[str, ...]:
    is_op = row.kind in ("op", "removed", "made")
    is_said = row.kind == "output" or (is_op and f"{row.name.rpartition('/')[2]}_".startswith(f"{row.op}_"))
    name = _name(row) + ("" if is_said else f" ({row.op if is_op else row.kind})")
    words = casts.words if casts is not None else ""
    cells = ("" if is_op else row.op, row.dtype.rpartition(" → ")[2], _shape(row))
    if row.kind == "output":
        return name, f"of {', '.join(casts.reads) if casts is not None and casts.reads else 'nothing'}"
    if row.mark is not None:
        return name, *cells, "", words, "", _of_mark(row)
    if row.planned is None:
        return name, *cells, "", words, "", "not in the plan" if row.kind == "op" else ""
    error = error_cell(row.planned.error)
    return name, row.planned.module or "(root)", *cells[1:], row.precisions, words, error, _why(row, notes)


def _full_cells(row: Row, notes: _Notes) -> tuple[str, ...]:
    name = _name(row)
    if row.cast is not None:
        saturates = ", saturating" if row.cast.saturates else ""
        words = f"of {row.cast.value} for {_listed(row.cast.readers)}{saturates}"
        return name, "cast", "", row.dtype, _shape(row), words
    if row.copy is not None:
        words = f"of {row.copy.parameter} for {_listed(row.copy.readers)}"
        return name, "working copy", "", row.dtype, _shape(row), words
    if row.mark is not None:
        return name, row.op, "", row.dtype, _shape(row), _of_mark(row)
    if row.kind == "output":
        return name, "output", "", f"of {', '.join(row.reads) or 'nothing'}"
    if row.kind not in ("op", "removed"):
        return name, row.kind, row.op, row.dtype, _shape(row), "", "", ""
    if row.planned is None:
        return name, row.op, "", "", _shape(row), "", "", "not in the plan"
    place = (row.planned.module or "(root)", row.dtype, _shape(row), row.precisions)
    why = _why(row, notes) + (f"; {reads_low(row)}" if row.low_reads else "")
    return name, row.op, *place, error_cell(row.planned.error), why


def _name(row: Row) -> str:
    mark = _MARKS.get(row.kind, "*" if row.is_own_cast else " ")
    return f"{mark} {'  ' * row.depth}{row.name}"


def _shape(row: Row) -> str:
    """The shape with symbols alone, whose sizes are above the table."""
    return re.sub(r"=\d+", "", re.sub(r"…=(?=\d)", "", row.shape))


def _of_mark(row: Row) -> str:
    return f"for {row.mark.value}, by {row.mark.made_by} ({row.mark.rule})" if row.mark is not None else ""


def _why(row: Row, notes: _Notes) -> str:
    """The category with the number of its reason, and what else led to the precision."""
    if row.planned is None or row.decision is None or row.precision is Precision.CAPTURED:
        return ""
    category, cause = str(row.decision.category), row.planned.placement.because
    words = f"{category} [{notes.number(row.decision, row.op)}]"
    says_more = cause.why not in (Why.FEWEST_BYTES, Why.AS_CAPTURED) and cause.why.value != category
    return f"{words}: {cause}" if says_more else words


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_READERS
    return ", ".join(names[:_MOST_READERS]) + (f" and {rest} more" if rest > 0 else "") or "nothing"


class _Notes:
    """Numbers reasons in the order in which they are first given, and collects their sources."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[str]]] = {}  # by reason: by source the ops

    def number(self, decision: Decision, op: str) -> int:
        ops = self._found.setdefault(decision.reason, {}).setdefault(str(decision.source), [])
        if op not in ops:
            ops.append(op)
        return list(self._found).index(decision.reason) + 1

    def lines(self, width: int | None) -> list[str]:
        """Each reason once, with its source; with one for each op where they differ."""
        lines = list[str]()
        for number, (reason, sources) in enumerate(self._found.items(), 1):
            each = [f"{', '.join(ops)} {source}" if len(sources) > 1 else source for source, ops in sources.items()]
            lines += wrapped(f"[{number}] {reason or 'no reason given'} ({'; '.join(each)})", width, "    ")
        return lines


def _painted(text: str, paint: str) -> str:
    """Colour a precision, or the mark before a name."""
    word = text.partition(",")[0] if paint == "runs" else text[:1] if paint == "mark" else ""
    return f"\033[{_COLOURS[word]}m{word}\033[0m{text[len(word) :]}" if word in _COLOURS else text
