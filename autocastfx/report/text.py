"""Render a converted graph as an aligned table: one line per op or per node, with its decision and placement."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autocastfx.errors import ArgumentError, listed
from autocastfx.graph.node import path_and_around
from autocastfx.plan.plan import Decision, Plan, PlannedNode, Precision, Traffic, Why, joint_error
from autocastfx.policy.float8 import Product
from autocastfx.policy.rule import Category, Selector, module_pattern
from autocastfx.policy.saved import Keep
from autocastfx.policy.yaml_tree import nearest
from autocastfx.report.columns import LEAST_WIDTH, Column, aligned, wrapped
from autocastfx.report.equal_layers import EqualLayers, equal_layers
from autocastfx.report.view import Row, View, error_cell

# The casts that each node of a graph reads, in words for the node's own line.

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
    folded: dict[str, FoldedCasts] = {}
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
        folded[row.name] = FoldedCasts("; ".join(words), first, reads)
    return folded


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
    row = known.get(value)
    path = row.op if row is not None and row.kind in _HELD else value.rpartition("/")[2]
    return path.removeprefix(f"{reader.module}.") if reader.module else path


def _read(read: Row, reader: Row, known: dict[str, Row]) -> str:
    if read.kind in ("cast", "copy"):
        return f"{_value(read, reader, known)} → {_dtype(read)}"
    return read.name


# Count the nodes and casts of a graph by op and by module.

_MODULES_LEGEND = (
    "modules whose paths differ in numbers alone, and whose counts are equal, are one line: the counts of each"
)
_ERROR_LEGEND = (
    "error: what the 16 bits of a module's own nodes are predicted to change together; in a line of several, the most"
)
_KINDS = ("op", "output")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def counted(rows: Iterable[Row], casts: Mapping[str, FoldedCasts], width: int | None) -> list[list[str]]:
    """Return the lines of two tables: nodes and casts by op, the most frequent first, and by module, in graph order.

    A cast counts where it is read first, which ``casts`` tells by the names of rows; nodes count for the module that
    they run in, not for those around it.
    """
    by_op, by_module = dict[str, Counter[str]](), dict[str, Counter[str]]()
    nodes = dict[str, list[PlannedNode]]()
    for row in (row for row in rows if row.kind in _KINDS):
        first = casts[row.name].first if row.name in casts else 0
        counts = Counter({"nodes": 1, str(row.precision): 1} if row.kind == "op" else {}) + Counter({"casts": first})
        if counts:
            module = row.module or "(root)"
            by_op.setdefault(row.op or row.kind, Counter()).update(counts)
            by_module.setdefault(module, Counter()).update(counts)
            nodes.setdefault(module, []).extend([row.planned] if row.planned is not None else [])
    shown = [str(p) for p in Precision if any(counts[str(p)] for counts in by_op.values())]
    titles = ["nodes", *shown, "casts"]
    ops = [(op, *_numbers(by_op[op], titles)) for op in sorted(by_op, key=lambda op: (-by_op[op]["nodes"], op))]
    errors = {module: error for module, own in nodes.items() if (error := joint_error(own)) is not None}
    modules = [
        (path, f"{len(paths):>7}", *numbers, error_cell(max((errors[p] for p in paths if p in errors), default=None)))
        for path, paths, numbers in _alike(by_module, titles)
    ]
    legend = wrapped(_MODULES_LEGEND, width, "  ") if any("*" in path for path, *_ in modules) else []
    legend += wrapped(_ERROR_LEGEND, width, "  ") if any(cells[-1] for cells in modules) else []
    return [
        aligned(list(map(Column, ("op", *titles))), ops, width),
        [*aligned(list(map(Column, ("module", "modules", *titles, "error"))), modules, width), *legend],
    ]


def _numbers(counts: Counter[str], titles: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{counts[title]:>{len(title)}}" for title in titles)


def _alike(
    by_module: Mapping[str, Counter[str]], titles: Sequence[str]
) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Return path, modules and counts of each group of modules that differ in numbers alone."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, counts in by_module.items():
        groups.setdefault((_NUMBER.sub("*", path), _numbers(counts, titles)), []).append(path)
    return [(pattern if len(paths) > 1 else paths[0], paths, numbers) for (pattern, numbers), paths in groups.items()]


# Select the rows that ``only=`` and ``module=`` of ``dump`` name.

_CASTS = "casts"
_PRECISIONS = tuple(map(str, Precision))
_CATEGORIES = tuple(map(str, Category))


def check_names(rows: Iterable[Row], only: str | None, module: str | None) -> None:
    """Check that arguments of :func:`selected` name something in the rows of all graphs of a model.

    Raises:
        ValueError: one names nothing; the message suggests the nearest.
    """
    planned = [row for row in rows if row.planned is not None]
    if only is not None:
        words = (*_PRECISIONS, _CASTS, *_CATEGORIES)
        ops = {row.op for row in planned}
        if only not in words and only not in ops:
            hint = nearest(only, {*words, *ops})
            raise ArgumentError(f"only is {', '.join(words)} or an op of the model, not {only!r}{hint}")
    if module is not None:
        paths = {path for row in planned for path in path_and_around(row.module)}
        try:
            module_pattern(module)
        except ValueError as error:
            raise ArgumentError(f"module is a path of modules or a pattern of it, not {module!r}: {error}") from error
        if not any(Selector(path=module).covers(path) for path in paths):
            raise ArgumentError(f"no module of the model matches {module!r}{nearest(module, paths)}")


def selected(rows: Sequence[Row], only: str | None = None, module: str | None = None) -> tuple[Row, ...]:
    """Return the rows of a graph that fit both arguments, in order; all without arguments, else those of planned nodes.

    ``only`` is a precision (``low``, ``float32``), ``casts`` (what reads casts, the output too), a category or an op;
    ``module`` is the path of a module with all inside it, or a pattern as in op lists (``layers.*.attn``, ``re:…``).
    """
    if only is None and module is None:
        return tuple(rows)
    casts = {row.name for row in rows if row.cast is not None or row.copy is not None}
    selector = Selector(path=module) if module is not None else None
    return tuple(
        row
        for row in rows
        if (selector is None or (row.planned is not None and any(map(selector.covers, path_and_around(row.module)))))
        and (not casts.isdisjoint(row.reads) if only == _CASTS else only in (None, *_words(row)))
    )


def _words(row: Row) -> Iterator[str]:
    if row.planned is not None:
        yield row.op
        yield str(row.precision)
        if row.precision is not Precision.CAPTURED:  # where nothing is at stake, nothing was decided
            yield str(row.planned.decision.category)


# Options of the text format of ``dump``.


@dataclass(frozen=True)
class TextOptions:
    """Arguments of the text format; the first five are those of :func:`dump`.

    Attributes:
        width: the most characters of a line; None for as many as it takes.
        full: a line for every node, not for ops alone.
        only: show nodes of this precision, category or op alone, or with ``"casts"`` what is cast.
        module: show nodes in these modules alone.
        summary: count nodes by op and by module, and list none.
        colour: colour marks and precisions for a terminal.

    Raises:
        ValueError: the width is too small.
    """

    width: int | None = 120
    full: bool = False
    only: str | None = None
    module: str | None = None
    summary: bool = False
    colour: bool = False

    def __post_init__(self) -> None:
        if self.width is not None and self.width < LEAST_WIDTH:
            raise ArgumentError(f"width is at least {LEAST_WIDTH} characters, or None for no limit, not {self.width}")
        if self.full and self.summary:
            raise ArgumentError("full=True lists every node and summary=True none: give one of them")


# Write the header lines of every rendering.

_RENEWED = "made anew when a parameter has changed, not in each call"


def summary(view: View) -> list[str]:
    """Return lines with dtype, device, op list, model and variant, and counts of nodes, casts and some ops."""
    plan = view.plan
    is_low_already = any(node.placement.because.why is Why.AS_CAPTURED for node in plan.nodes)
    untouched = f"no {plan.low} value, or the model's own cast" if is_low_already else "no float32 value"
    # counts of nodes by precision, and of casts by dtype
    run = [row.precision for row in view.rows if row.kind == "op"]
    low, wide, captured = (run.count(p) for p in (Precision.LOW, Precision.FLOAT32, Precision.CAPTURED))
    others = (p for p in Precision if p not in (Precision.LOW, Precision.FLOAT32, Precision.CAPTURED) and p in run)
    given = "".join(f", {run.count(p)} {'as given' if p is Precision.GIVEN else p}" for p in others)
    casts = [row.cast for row in view.rows if row.cast is not None]
    to, saturating = Counter(cast.dtype for cast in casts), sum(cast.saturates for cast in casts)
    to_dtypes = " and ".join(f"{to[dtype]} to {dtype}" for dtype in dict.fromkeys((plan.low, "float32", *to)))
    unlisted = ", ".join(f"{op} ({count})" for op, count in sorted(plan.unlisted.items())) or "none"
    counts = sorted(Counter(r.pattern for r in plan.recomposed).items())
    copied = len({copy.parameter for copy in plan.copies})
    recomposed = [f"recomposed: {', '.join(f'{name} ({count})' for name, count in counts)}"] if counts else []
    return [
        f"autocastfx: {plan.low} on {plan.device}, op list {plan.op_list}",
        *([f"model: {view.model}"] if view.model else []),
        f"variant: {view.variant}",
        f"nodes: {low} low ({plan.low}), {wide} float32{given}, {captured} captured ({untouched})",
        f"casts: {len(casts)}, of which {to_dtypes}; {saturating} saturating",
        *([f"working copies: of {copied} parameters, {_RENEWED}"] if copied else []),
        *_float8(plan),
        *_saved(plan),
        _moved(plan),
        *([f"predicted error of the {view.predicted.of}: {plan.error_in_words}"] if plan.error is not None else []),
        f"unlisted ops: {unlisted}",
        *recomposed,
        *view.outside,
    ]


def _float8(plan: Plan) -> Iterator[str]:
    """A line on float8 products and the values that they read, if the list has rules on them."""
    planned = [node.float8 for node in plan.nodes if node.float8 is not None]
    if planned:
        count, of = sum(len(one.products) for one in planned), sum(len(Product) for _ in planned)
        shared = sum(len(one.readers) > 1 for one in plan.quantized)
        values = f"; values in float8: {len(plan.quantized)}, of which {shared} with several readers"
        yield f"products in float8: {count} of {of}" + (values if count else "")


def _saved(plan: Plan) -> Iterator[str]:
    """A line on what is kept for backward, if the list has rules on it."""
    if plan.saved:
        before, kept = sum(one.bytes for one in plan.saved), sum(one.kept for one in plan.saved)
        counts = Counter(one.keep for one in plan.saved)
        said = ", ".join(f"{counts[keep]} {keep.in_words}" for keep in Keep if counts[keep])
        yield f"kept for backward: {kept / 1e6:.2f} MB instead of {before / 1e6:.2f}; values: {said}"


def _moved(plan: Plan) -> str:
    by_casts = sum(cast.bytes for cast in plan.casts)
    if plan.traffic == Traffic():  # placement: follow compares no costs
        return f"bytes moved by casts: {by_casts:,}"
    moved, simply = plan.traffic.moved, plan.traffic.moved_simply
    others = ", with other values in 16 bits" if simply < moved else ""
    return f"bytes moved: {moved:,}, of which by casts {by_casts:,}; by TensorFlow's rule {simply:,}{others}"


_LEGEND = {"+": "made by the conversion", "-": "in the captured graph only", "*": "the model's own cast"}
_WHY = Column("why", from_end=True, least=10)  # a category and the number of its reason
_ERROR = Column("error")
_PLACE = (
    Column("module", weight=1.5, is_path=True),
    Column("dtype"),
    Column("shape", weight=1.2),
    Column("runs", "runs"),
)
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
            is_whole = options.only is None and options.module is None
            equal = equal_layers(view.rows, {name: one.words for name, one in casts.items()}, lines) if is_whole else []
            columns, cells = _FOLDED, list(_lines(lines, casts, equal, notes))
        tables = [aligned(columns, cells, options.width, *([_painted] if options.colour else []))]
        head += _legends(view.rows, cells)
    prose = [line for text in head for line in wrapped(text, options.width, "  ")]
    blocks = (prose, *(tables if shown else [["no node fits"]]), notes.lines(options.width))
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _lines(
    rows: Sequence[Row], casts: Mapping[str, FoldedCasts], equal: Sequence[EqualLayers], notes: _Notes
) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row, and one line in the place of layers that are equal to one above."""
    stands = {name: one for one in equal for name in one.names}
    told = set[EqualLayers]()
    for row in rows:
        layers = stands.get(row.name)
        if layers is None:
            yield _folded_cells(row, casts.get(row.name), notes)
        elif layers not in told:
            told.add(layers)
            yield (f"  … {layers.says}",)


def _legends(rows: Sequence[Row], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each thing in the table that does not explain itself."""
    marks = [f"{mark} {words}" for mark, words in _LEGEND.items() if any(line[0][0] == mark for line in cells)]
    if marks:
        yield f"first column: {', '.join(marks)}"
    if any(cell.startswith("(") and "→" in cell for line in cells for cell in line):
        yield "casts in brackets: those that an op above reads too"
    if any("[" in line[-1] for line in cells):
        yield "why: category, [note], and the neighbour that forced it"
    if any(row.planned is not None and row.planned.error is not None for row in rows):
        yield "error: what the 16 bits of this node, or of what it reads, are predicted to change"
    sizes = dict(pair for row in rows for pair in _SYMBOL.findall(row.shape))
    if sizes:
        known = ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
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
    op = row.op.removeprefix("autocastfx::") if row.kind == "made" else row.op
    name = _name(row) + ("" if is_said else f" ({op if is_op else row.kind})")
    words = casts.words if casts is not None else ""
    cells = ("" if is_op else row.op, row.dtype.rpartition(" → ")[2], _shape(row))
    if row.kind == "output":
        return name, f"of {', '.join(casts.reads) if casts is not None and casts.reads else 'nothing'}"
    if row.mark is not None:
        return name, *cells, "", words, "", _of_mark(row)
    if row.planned is None:
        return name, *cells, "", words, "", "not in the plan" if row.kind == "op" else ""
    error = error_cell(row.planned.error)
    return name, row.module or "(root)", *cells[1:], row.precisions, words, error, _why(row, notes)


def _full_cells(row: Row, notes: _Notes) -> tuple[str, ...]:
    name = _name(row)
    if row.cast is not None:
        saturates = ", saturating" if row.cast.saturates else ""
        words = f"of {row.cast.value} for {listed(row.cast.readers, _MOST_READERS) or 'nothing'}{saturates}"
        return name, "cast", "", row.dtype, _shape(row), words
    if row.copy is not None:
        words = f"of {row.copy.parameter} for {listed(row.copy.readers, _MOST_READERS) or 'nothing'}"
        return name, "working copy", "", row.dtype, _shape(row), words
    if row.mark is not None:
        return name, row.op, "", row.dtype, _shape(row), _of_mark(row)
    if row.kind == "output":
        return name, "output", "", f"of {', '.join(row.reads) or 'nothing'}"
    if row.kind not in ("op", "removed"):
        return name, row.kind, row.op, row.dtype, _shape(row), "", "", ""
    if row.planned is None:
        return name, row.op, "", "", _shape(row), "", "", "not in the plan"
    place = (row.module or "(root)", row.dtype, _shape(row), row.precisions)
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
    numbers = [notes.number(row.decision, row.op), *([notes.of_text(row.float8)] if row.float8 else [])]
    words = " ".join([category, *(f"[{number}]" for number in numbers)])
    says_more = cause.why not in (Why.FEWEST_BYTES, Why.AS_CAPTURED) and cause.why.value != category
    return f"{words}: {cause}" if says_more else words


class _Notes:
    """Numbers reasons in the order in which they are first given, and collects their sources."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[str]]] = {}  # by reason: by source the ops

    def number(self, decision: Decision, op: str) -> int:
        ops = self._found.setdefault(decision.reason, {}).setdefault(str(decision.source), [])
        if op not in ops:
            ops.append(op)
        return list(self._found).index(decision.reason) + 1

    def of_text(self, text: str) -> int:
        """The number of a reason that has no source."""
        self._found.setdefault(text, {})
        return list(self._found).index(text) + 1

    def lines(self, width: int | None) -> list[str]:
        """Each reason once, with its source; with one for each op where they differ."""
        lines = list[str]()
        for number, (reason, sources) in enumerate(self._found.items(), 1):
            each = [f"{', '.join(ops)} {source}" if len(sources) > 1 else source for source, ops in sources.items()]
            placed = f" ({'; '.join(each)})" if each else ""
            lines += wrapped(f"[{number}] {reason or 'no reason given'}{placed}", width, "    ")
        return lines


def _painted(text: str, paint: str) -> str:
    """Colour a precision, or the mark before a name."""
    word = text.partition(",")[0] if paint == "runs" else text[:1] if paint == "mark" else ""
    return f"\033[{_COLOURS[word]}m{word}\033[0m{text[len(word) :]}" if word in _COLOURS else text
