"""Join the nodes of a converted graph with its plan, for the renderers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import fx, nn

from autocastfx.dtypes import dtype_name
from autocastfx.graph.names import op_name
from autocastfx.graph.node import attributes_of, dtypes, origin, stack_trace, subgraphs, tensors
from autocastfx.plan.plan import Plan, PlannedNode, Precision
from autocastfx.report.attributes import attributes
from autocastfx.report.predicted_error import PredictedError
from autocastfx.report.row import Row
from autocastfx.report.shape import Shapes, Values, bytes_of, captured_values
from autocastfx.report.source_line import source_line
from autocastfx.runtime.variant import Variant
from autocastfx.runtime.working_copies import ATTRIBUTE

__all__ = ["View", "view", "view_of_graph"]

_MOUNTED = re.compile(r"^_variants_*\.\d+\.")  # where an AmpModule keeps the constants and sub-graphs of a variant


@dataclass(frozen=True)
class View:
    """A converted graph for the renderers.

    Attributes:
        plan: the graph's plan.
        variant: a description of the variant.
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


def view(owner: nn.Module, variant: Variant, words: str) -> View:
    """Join a graph and its plan. Works for unpickled graphs too, which have no abstract values.

    Args:
        owner: the module that holds the targets of the graph's ``get_attr`` nodes.
        variant: the converted graph.
        words: a description of the variant.
    """
    plan = variant.plan
    captured = variant.captured
    values = dict(captured_values(captured.graph, captured.attributes)) if captured is not None else {}
    join = _Join(plan, [leaf[1] for leaf in variant.structure.leaves if leaf[0] == "tensor"], values)
    rows = tuple(_with_removed(_with_low_reads(join.rows(owner, variant.graph, variant.code, ""), plan), plan))
    return View(plan, words, rows, variant.mode, str(variant.structure), str(variant.guard), join.codes)


def view_of_graph(module: fx.GraphModule, plan: Plan, words: str) -> View:
    """Join a converted graph that belongs to no model with its plan.

    Args:
        module: the graph with all that it reads; parameters are among its inputs.
        plan: its plan.
        words: a description of it.
    """
    inputs = [next(iter(dtypes(node)), None) for node in module.graph.nodes if node.op == "placeholder"]
    join = _Join(plan, inputs, {})
    rows = tuple(_with_removed(_with_low_reads(join.rows(module, module.graph, module.code, ""), plan), plan))
    return View(plan, words, rows, codes=join.codes)


class _Join:
    """Makes rows, and collects the code of each graph."""

    def __init__(self, plan: Plan, inputs: Sequence[torch.dtype | None], captured: Mapping[str, Values]) -> None:
        self.low = plan.low
        self.nodes = {n.name: n for n in plan.nodes}
        self.casts = {c.name: c for c in plan.casts}
        self.copies = {c.name: c for c in plan.copies}
        self.inputs = iter(inputs)
        self.shapes = Shapes(plan, captured)
        self.is_draft = plan.unverified  # its values are stand-ins of one element
        self.codes: dict[str, str] = {}

    def rows(self, owner: nn.Module, graph: fx.Graph, code: str, prefix: str) -> Iterator[Row]:
        self.codes[prefix] = code
        held = attributes_of(owner, graph)
        for node in (n for n in graph.nodes if not _holds_copies(n)):
            name, depth = prefix + node.name, prefix.count("/")
            reads = tuple(prefix + read.name for read in node.all_input_nodes if not _holds_copies(read))
            if node.op == "placeholder":
                dtype = None if prefix else next(self.inputs, None)
                said = _name(dtype) if dtype is not None else ""
                yield self._sized(Row(name, "input", dtype=said, depth=depth), self._values(node))
            elif node.op == "get_attr":
                found = held[str(node.target)]
                kind, dtype = _attribute(found, str(node.target), prefix)
                read = Row(name, kind, _MOUNTED.sub("", str(node.target)), dtype, depth)
                yield self._sized(read, (found,) if isinstance(found, torch.Tensor) else ())
            elif node.op == "output":
                yield Row(name, "output", depth=depth, reads=reads)
            else:
                inner = {f"{prefix}{_MOUNTED.sub('', t)}/": part for t, part in subgraphs(node, held).items()}
                inner = {p: part for p, part in inner.items() if self._knows(p)}
                runs = tuple(p.removesuffix("/") for p in inner)
                line = source_line(stack_trace(node))
                row = self._sized(self._row(node, name), self._values(node))
                yield replace(row, depth=depth, reads=reads, runs=runs, line=line, attributes=attributes(node))
                for inner_prefix, part in inner.items():
                    yield from self.rows(part, part.graph, part.code, inner_prefix)

    def _values(self, node: fx.Node) -> Values:
        return () if self.is_draft else tensors(node)

    def _sized(self, row: Row, values: Values) -> Row:
        return replace(row, shape=self.shapes.of(row.name, values), bytes=bytes_of(values))

    def _knows(self, prefix: str) -> bool:
        """True if the plan has nodes of a sub-graph; false for sub-graphs that stay whole."""
        return any(name.startswith(prefix) for name in (*self.nodes, *self.casts))

    def _row(self, node: fx.Node, name: str) -> Row:
        planned, cast, mark = self.nodes.get(name), self.casts.get(name), origin(node)
        if cast is not None:
            change = f"{self.low if cast.dtype == 'float32' else 'float32'} → {cast.dtype}"
            return Row(name, "cast", op_name(node), change, cast=cast, mark=mark)
        if (copy := self.copies.get(name)) is not None:
            return Row(name, "copy", dtype=f"float32 → {copy.dtype}", copy=copy, mark=mark)
        op = planned.op if planned is not None else op_name(node)
        return Row(name, "made" if mark is not None else "op", op, _change(planned), planned=planned, mark=mark)


def _with_low_reads(rows: Iterable[Row], plan: Plan) -> list[Row]:
    found: list[Row] = []
    dtypes: dict[str, str] = {}
    for row in rows:
        dtypes[row.name] = row.dtype.rpartition(" → ")[2]
        low: tuple[str, ...] = ()
        if row.precision is Precision.FLOAT32 and row.planned is not None and row.planned.placement.as_stored:
            low = tuple(name for name in row.reads if dtypes.get(name) == plan.low)
        found.append(replace(row, low_reads=low))
    return found


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


def _attribute(held: object, target: str, prefix: str) -> tuple[str, str]:
    """Return kind and dtype of the attribute that a ``get_attr`` node reads."""
    if not isinstance(held, torch.Tensor):
        return ("sub-graph" if isinstance(held, nn.Module) else "constant"), ""
    if isinstance(held, nn.Parameter):
        return "parameter", _name(held.dtype)
    return ("constant" if prefix or _MOUNTED.match(target) else "buffer"), _name(held.dtype)


def _change(planned: PlannedNode | None) -> str:
    if planned is None:
        return ""
    before, after = _counted(planned.captured), _counted(planned.dtype)
    return before if before == after else f"{before} → {after}"


def _counted(dtypes: str) -> str:
    """Shorten ``float32,float32,int64`` to ``float32 x 2,int64``."""
    runs = [(name, len(list(same))) for name, same in groupby(dtypes.split(","))]
    return ",".join(name if count == 1 else f"{name} x {count}" for name, count in runs)


def _name(dtype: torch.dtype) -> str:
    return dtype_name(dtype)
