"""Join the nodes of a converted graph with its plan, for the renderers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import fx, nn

from autocastfx.dtypes import dtype_name
from autocastfx.errors import Source
from autocastfx.graph.alias import moves
from autocastfx.graph.cell import shortened
from autocastfx.graph.names import op_name
from autocastfx.graph.node import (
    HeldTensor,
    Origin,
    attributes_of,
    dtypes,
    example,
    example_size,
    origin,
    recomputed,
    settings,
    stack_trace,
    subgraphs,
    tensors,
)
from autocastfx.graph.walk import Key
from autocastfx.plan.plan import (
    NOT_FLOAT32,
    USER_CAST,
    Decision,
    Plan,
    PlannedCast,
    PlannedCopy,
    PlannedNode,
    PlannedQuantized,
    Precision,
)
from autocastfx.plan.sensitivity import Effect, Sensitivity
from autocastfx.report.lint.roofline import ProductFlops, bytes_of
from autocastfx.runtime.variant import Variant
from autocastfx.runtime.working_copies import ATTRIBUTE

# Say what a measured sensitivity predicts for a node of a plan, and for the plan.


@dataclass(frozen=True)
class PredictedError:
    """What was measured for a graph.

    Attributes:
        of: what changes, ``"gradient"`` or ``"output"``; a word for both where the measurement is not at hand.
        effects: of the nodes of graphs in the mode of this one; empty likewise.
    """

    of: str = "result"
    effects: Mapping[Key, Effect] = field(default_factory=dict[Key, Effect])

    @classmethod
    def by(cls, sensitivity: Sensitivity, mode: str) -> PredictedError:
        """Take what was measured for a graph in ``mode``; that of a graph in mixed modes counts as training."""
        return cls(sensitivity.of, sensitivity.effects_in("eval" if mode == "eval" else "train"))

    def sentences(self, node: PlannedNode) -> Iterator[str]:
        """Yield what the node's precision does, and for one in float32 what 16 bits would do."""
        is_low = node.placement.run is Precision.LOW
        if node.error is not None:
            what = "16 bits and float8" if node.products and node.float8 and node.float8.errors else "16 bits"
            subject = f"{what} here change" if is_low else "16 bits around it, which round what it passes back, change"
            yield f"{subject} the {self.of} by {node.error:.1e}."
        effect = self.effects.get((node.name, node.op, node.module))
        if not is_low and effect is not None and effect.overflows:
            yield "In 16 bits a value would overflow."
        elif not is_low and effect is not None and effect.error:
            yield f"In 16 bits it would change the {self.of} by {effect.error:.1e}."


@dataclass(frozen=True)
class View:
    """A converted graph for the renderers.

    Attributes:
        plan: the graph's plan.
        variant: a description of the variant.
        title: what tells it from the model's other graphs: number, mode, inputs with their sizes, device.
        mode, call, sizes: the variant's key, as in ``ComparedVariant``.
        rows: in graph order; the rows of a sub-graph follow the node that runs it.
        codes: generated Python code by the prefix of node names: ``""`` for the graph, then its sub-graphs.
        model: the name of the model's class, where it is known.
        predicted: what was measured for the graph, for what its plan predicts.
        outside: sentences on what of the model is in no graph, and on rules that match nothing.
    """

    plan: Plan
    variant: str
    rows: tuple[Row, ...]
    mode: str = ""
    call: str = ""
    sizes: str = ""
    codes: Mapping[str, str] = field(default_factory=dict[str, str])
    model: str = ""
    predicted: PredictedError = field(default_factory=PredictedError)
    outside: tuple[str, ...] = ()
    title: str = ""


# Write the shapes of a graph's values.

Values = tuple[torch.Tensor, ...]
_SYMBOL = re.compile(r"\b([a-z]+)\d+\b")
_AROUND = re.compile(r"^\(([^()]*)\)$")
_SIMPLE = re.compile(r"\w+(?:(?: [+-] |\*|//)\w+)?")  # an expression that says more than its value does
_NAMED = re.compile(r"[^\[\], ][^\[\],]*=(\d+)")


class Shapes:
    """Writes the shapes of the values of one graph.

    A size that may differ from call to call is a symbol with its size in the example inputs: ``[s0=8, 32]``. Symbols
    are numbered in the order in which they come, so that they are the same with every version of torch. The verified
    graph holds sizes of the example inputs alone; symbols come from the values of the captured graph.
    """

    def __init__(self, plan: Plan, captured: Mapping[str, Values]) -> None:
        self._captured = captured
        self._behind = {made.node: made.replaced for made in plan.recomposed}
        self._behind |= {cast.name: (cast.value,) for cast in plan.casts}
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def of(self, name: str, values: Values) -> str:
        """Write ``[s0=8, 32] x 2, [4]`` for a node that gives three tensors; an empty text for none."""
        shapes = (f"[{', '.join(map(self._size, value.shape))}]" for value in self._symbolic(name, values))
        return ", ".join(_runs(shapes))

    def _symbolic(self, name: str, values: Values) -> Values:
        """The captured values of the node, or of what it stands for, if they have its sizes; else its own values."""
        sizes = _sizes(values)
        for known in (name, *reversed(self._behind.get(name, ()))):
            if known in self._captured and _sizes(self._captured[known]) == sizes:
                return self._captured[known]
        return values

    def _size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
            return str(int(size))
        said, known = _SYMBOL.sub(self._name, str(size.node.expr)), example(size)
        said = _AROUND.sub(r"\1", said)
        said = said if known is None or _SIMPLE.fullmatch(said) else "…"
        return said if known is None else f"{said}={known}"

    def _name(self, match: re.Match[str]) -> str:
        letter = match[1]
        if match[0] not in self._names:
            self._names[match[0]] = f"{letter}{self._counts.get(letter, 0)}"
            self._counts[letter] = self._counts.get(letter, 0) + 1
        return self._names[match[0]]


def in_numbers(shape: str) -> str:
    """Return a shape of :class:`Shapes` with the sizes of the example inputs alone: ``[8, 32]`` of ``[s0=8, 32]``."""
    return _NAMED.sub(r"\1", shape)


def captured_values(graph: fx.Graph, attributes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Values]]:
    """Yield the abstract tensors of each node of a captured graph and its sub-graphs, by the node's name in a plan.

    ``attributes`` holds the sub-graphs by the targets of the ``get_attr`` nodes that read them.
    """
    for node in graph.nodes:
        yield prefix + node.name, tensors(node)
        for target, part in (subgraphs(node, attributes) | recomputed(node)).items():
            yield from captured_values(part.graph, attributes_of(part, part.graph), f"{prefix}{target}/")


def _sizes(values: Values) -> list[list[Any]]:
    return [[example_size(size) for size in value.shape] for value in values]


# Write the arguments of an op that are no values: dimensions, epsilons, modes.

_LONGEST_TEXT = 80


def attributes(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Return the names of such arguments of a node, with what the call gives: ``("dim", "-1")``.

    A size that another node computes is written by that node's name. Without a schema, the name is a position.
    """
    if node.op != "call_function":
        return ()
    return tuple(
        (f"argument {name}" if name.isdecimal() else name, shortened(_text(setting), _LONGEST_TEXT, from_end=True))
        for name, setting in settings(node)
    )


def _text(setting: Any) -> str:
    if isinstance(setting, (list, tuple)):
        return f"[{', '.join(map(_text, setting))}]"
    if isinstance(setting, torch.dtype):
        return dtype_name(setting)
    return setting.name if isinstance(setting, fx.Node) else repr(setting)


def error_cell(error: float | None) -> str:
    """Return a predicted error for a table; empty if there is none."""
    return "" if error is None else f"{error:.1e}"


def float8_clauses(node: PlannedNode, quantized: Iterable[PlannedQuantized]) -> Iterator[str]:
    """Yield which products of a node run in float8, and which values of ``quantized`` it reads, as others do."""
    if node.float8 is not None:
        yield f"products: {node.float8}"
        if node.float8.errors:
            yield node.float8.errors_in_words
    for one in (one for one in quantized if node.name in one.readers):
        others = [name for name in one.readers if name != node.name]
        does = f", as {', '.join(others)} {'do' if len(others) > 1 else 'does'}" if others else ""
        yield f"reads {one.name}: {one.value} by {one.layout}{does}"


# Find the source line that made a node in the stack trace that capture recorded.

_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)
_PACKAGES = tuple(f"{path}{os.sep}" for folder in _FOLDERS for path in (folder, folder.resolve()))
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .*\n(?! *File) *(.*)$', re.MULTILINE)


@dataclass(frozen=True)
class SourceLine:
    """A line of a model's code.

    Attributes:
        path: the file's path, as imported.
        number: the line's number.
        code: the line's text.
    """

    path: str
    number: int
    code: str

    @property
    def file(self) -> str:
        """The names of folder and file, without the rest of the path, which differs from machine to machine."""
        parts = PureWindowsPath(self.path).parts[-2:]  # splits at both kinds of slash
        return "/".join(part for part in parts if part != "/" and part != "\\")

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.code}"


def source_line(trace: str) -> SourceLine | None:
    """Return the innermost line outside torch and this package; None if the trace has none."""
    own = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_PACKAGES)]
    if not own:
        return None
    file, number, code = own[-1]
    return SourceLine(file, int(number), code.strip())


# One line of a rendering: a node of a converted graph with all that is known of it.

_CASTS = ("to", "_to_copy", "type_as")


@dataclass(frozen=True)
class Row:
    """One node.

    Attributes:
        name: as in the plan: that of a node in a sub-graph is ``subgraph/name``.
        kind: ``input``, ``parameter``, ``buffer``, ``constant``, ``sub-graph``, ``op``, ``cast`` (by the conversion),
            ``copy`` (the conversion's read of a working copy), ``made`` (by the conversion, neither), ``removed`` (in
            the plan, not in the graph) or ``output``.
        op: op name; of a parameter, buffer, constant or sub-graph its path.
        dtype: as captured and, where that changed, after an arrow as it is now. Empty where nothing says it.
        depth: how many graphs are around the node's own.
        reads: names of the rows that it reads, each once.
        runs: names of the sub-graphs that it runs, for which there are rows.
        planned, cast, copy, mark: what the plan and the node itself say, where they say anything.
        line: of the model's code that made it, where that is known.
        shape: the value's shape, as in :class:`~autocastfx.report.view.Shapes`. Empty if the value is not a tensor, or
            if the shape is unknown: in an unpickled graph only parameters, buffers and constants have one.
        attributes: the op's constant arguments, each with its name: ``("dim", "-1")``.
        bytes: the value's bytes for the sizes of the example inputs; 0 where the shape is empty.
        low_reads: the rows that a float32 op reads in 16 bits, for its kernel computes in float32 inside.
        flops: its multiplications and additions, if it is a matrix product or a convolution of known sizes; else 0.
        computes: it reads and writes elements; false for views, sizes, members of tuples and casts of the model's own.
    """

    name: str
    kind: str
    op: str = ""
    dtype: str = ""
    depth: int = 0
    reads: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    planned: PlannedNode | None = None
    cast: PlannedCast | None = None
    copy: PlannedCopy | None = None
    mark: Origin | None = None
    line: SourceLine | None = None
    shape: str = ""
    bytes: int = 0
    attributes: tuple[tuple[str, str], ...] = ()
    low_reads: tuple[str, ...] = ()
    computes: bool = False
    flops: int = 0

    @property
    def module(self) -> str:
        """The path of the module of a planned node; empty for the root, and for every other row."""
        return self.planned.module if self.planned is not None else ""

    @property
    def precision(self) -> Precision:
        """The precision that an op runs in; ``captured`` for every other row."""
        return self.planned.placement.run if self.planned is not None else Precision.CAPTURED

    @property
    def precisions(self) -> str:
        """The precision that an op runs in, in words, with that of its storage where it is another."""
        if self.planned is None:
            return ""
        return str(self.planned.placement) + (", float8" if self.planned.products else "")

    @property
    def float8(self) -> str:
        """Which products of the node run in float8, and why the others do not; empty without float8 rules."""
        planned = self.planned.float8 if self.planned is not None else None
        return "; ".join(filter(None, (str(planned), planned.errors_in_words))) if planned is not None else ""

    @property
    def decision(self) -> Decision | None:
        """The decision; its source is the same on every machine, for an absolute path is cut to the file's name."""
        decision = self.planned.decision if self.planned is not None else None
        if decision is None or not isinstance(decision.source, Source):
            return decision
        return replace(decision, source=decision.source.portable)

    @property
    def is_own_cast(self) -> bool:
        """True for a cast that the captured model makes itself."""
        if self.planned is None:
            return False
        source = self.planned.decision.source
        return source == USER_CAST or (source == NOT_FLOAT32 and self.op in _CASTS)


_MOUNTED = re.compile(r"^_variants_*\.\d+\.")  # where an AmpModule keeps the constants and sub-graphs of a variant


_MOST_INPUTS = 4  # that a title names


def titled(view: View, number: str, held: Iterable[str] = ()) -> View:
    """Return a view with a title, which begins with the number of its graph, and its mode.

    ``held`` are the names of parameters and buffers among the inputs of the graph; they are left out.
    """
    names = set(held)
    rows = [row for row in view.rows if row.kind == "input" and not row.depth and row.name not in names]
    inputs = [f"{row.name}={row.dtype}{in_numbers(row.shape)}" for row in rows if row.shape]
    if not inputs and view.call:
        inputs = [view.call]
    more = [f"{len(inputs) - _MOST_INPUTS} more inputs"] if len(inputs) > _MOST_INPUTS else []
    return replace(view, title=", ".join([number, *inputs[:_MOST_INPUTS], *more, view.plan.device]))


def view(owner: nn.Module, variant: Variant, words: str) -> View:
    """Join a graph and its plan, with words for it. Works for unpickled graphs too, which have no abstract values.

    ``owner`` is the module that holds the targets of the graph's ``get_attr`` nodes.
    """
    captured = variant.captured
    values = dict(captured_values(captured.graph, captured.attributes)) if captured is not None else {}
    inputs = [leaf[1] for leaf in variant.structure.leaves if leaf[0] == "tensor"]
    joined = _Join(variant.plan, inputs, values).view(owner, variant.graph, variant.code, words)
    return replace(joined, mode=variant.mode, call=str(variant.structure), sizes=str(variant.guard))


def view_of_graph(module: fx.GraphModule, plan: Plan, words: str) -> View:
    """Join a converted graph that belongs to no model, with all that it reads, with its plan; parameters are among its
    inputs.
    """
    inputs = [next(iter(dtypes(node)), None) for node in module.graph.nodes if node.op == "placeholder"]
    return _Join(plan, inputs, {}).view(module, module.graph, module.code, words)


class _Join:
    """Makes rows, and collects the code of each graph."""

    def __init__(self, plan: Plan, inputs: Sequence[torch.dtype | None], captured: Mapping[str, Values]) -> None:
        self.plan = plan
        self.nodes = {n.name: n for n in plan.nodes}
        self.casts = {c.name: c for c in plan.casts}
        self.copies = {c.name: c for c in plan.copies}
        self.inputs = iter(inputs)
        self.shapes = Shapes(plan, captured)
        self.codes: dict[str, str] = {}
        self.flops = ProductFlops()

    def view(self, owner: nn.Module, graph: fx.Graph, code: str, words: str) -> View:
        rows = tuple(_with_low_reads(self.rows(owner, graph, code, ""), self.plan.low))
        return View(self.plan, words, tuple(_with_removed(rows, self.plan)), codes=self.codes)

    def rows(self, owner: nn.Module, graph: fx.Graph, code: str, prefix: str) -> Iterator[Row]:
        self.codes[prefix] = code
        attribute_values = attributes_of(owner, graph)
        for node in (n for n in graph.nodes if not _holds_copies(n)):
            name, depth = prefix + node.name, prefix.count("/")
            reads = tuple(prefix + read.name for read in node.all_input_nodes if not _holds_copies(read))
            if node.op == "placeholder":
                dtype = None if prefix else next(self.inputs, None)
                said = dtype_name(dtype) if dtype is not None else ""
                row = Row(name, "input", dtype=said, depth=depth)
                if (held := HeldTensor.of(node)) is not None:  # torch.compile passes in what the model holds
                    row = replace(row, kind=held.kind, op=held.path)
                yield self._sized(row, tensors(node))
            elif node.op == "get_attr":
                value = attribute_values[str(node.target)]
                kind, dtype = _attribute(value, str(node.target), prefix)
                read = Row(name, kind, _MOUNTED.sub("", str(node.target)), dtype, depth)
                yield self._sized(read, (value,) if isinstance(value, torch.Tensor) else ())
            elif node.op == "output":
                yield Row(name, "output", depth=depth, reads=reads)
            else:
                graphs = subgraphs(node, attribute_values) | recomputed(node)
                inner = {f"{prefix}{_MOUNTED.sub('', t)}/": part for t, part in graphs.items()}
                planned = (*self.nodes, *self.casts)  # not of sub-graphs that stay whole
                inner = {p: part for p, part in inner.items() if any(one.startswith(p) for one in planned)}
                runs = tuple(p.removesuffix("/") for p in inner)
                line = source_line(stack_trace(node))
                row = self._sized(self._row(node, name), tensors(node))
                yield replace(row, depth=depth, reads=reads, runs=runs, line=line, attributes=attributes(node))
                for inner_prefix, part in inner.items():
                    yield from self.rows(part, part.graph, part.code, inner_prefix)

    def _sized(self, row: Row, values: Values) -> Row:
        return replace(row, shape=self.shapes.of(row.name, values), bytes=bytes_of(values))

    def _row(self, node: fx.Node, name: str) -> Row:
        planned, cast, mark = self.nodes.get(name), self.casts.get(name), origin(node)
        if cast is not None:
            change = f"{self.plan.low if cast.dtype == 'float32' else 'float32'} → {cast.dtype}"
            return Row(name, "cast", op_name(node), change, cast=cast, mark=mark)
        if (copy := self.copies.get(name)) is not None:
            return Row(name, "copy", dtype=f"float32 → {copy.dtype}", copy=copy, mark=mark)
        op = planned.op if planned is not None else op_name(node)
        row = Row(name, "made" if mark is not None else "op", op, _change(planned), planned=planned, mark=mark)
        if row.kind != "op" or row.is_own_cast or not moves(node):
            return row
        return replace(row, computes=True, flops=self.flops.of(node))


def _with_low_reads(rows: Iterable[Row], low: str) -> Iterator[Row]:
    dtypes: dict[str, str] = {}
    for row in rows:
        dtypes[row.name] = row.dtype.rpartition(" → ")[2]
        if row.precision is Precision.FLOAT32 and row.planned is not None and row.planned.placement.as_stored:
            row = replace(row, low_reads=tuple(name for name in row.reads if dtypes.get(name) == low))
        yield row


def _with_removed(rows: Sequence[Row], plan: Plan) -> Iterator[Row]:
    """Yield the rows, and one for each planned node that the graph lacks, after its predecessor in the plan."""
    shown = {row.name for row in rows}
    after: dict[str, list[Row]] = {}
    last: dict[str, str] = {}
    for planned in plan.nodes:
        graph = planned.name.rpartition("/")[0]
        if planned.name in shown:
            last[graph] = planned.name
        else:
            removed = Row(
                planned.name, "removed", planned.op, planned.captured, planned.name.count("/"), planned=planned
            )
            after.setdefault(last.get(graph, ""), []).append(removed)
    yield from after.get("", ())
    for row in rows:
        yield row
        yield from after.get(row.name, ())


def _holds_copies(node: fx.Node) -> bool:
    return node.op == "get_attr" and node.target == ATTRIBUTE


def _attribute(value: object, target: str, prefix: str) -> tuple[str, str]:
    """Return kind and dtype of the attribute that a ``get_attr`` node reads."""
    if not isinstance(value, torch.Tensor):
        return ("sub-graph" if isinstance(value, nn.Module) else "constant"), ""
    if isinstance(value, nn.Parameter):
        return "parameter", dtype_name(value.dtype)
    return ("constant" if prefix or _MOUNTED.match(target) else "buffer"), dtype_name(value.dtype)


def _change(planned: PlannedNode | None) -> str:
    if planned is None:
        return ""
    before, after = (",".join(_runs(named.split(","))) for named in (planned.captured, planned.dtype))
    return before if before == after else f"{before} → {after}"


def _runs(words: Iterable[str]) -> Iterator[str]:
    """Yield each word once where it repeats, and how often: ``float32 x 2``, ``int64``."""
    for word, same in groupby(words):
        count = len(list(same))
        yield word if count == 1 else f"{word} x {count}"
