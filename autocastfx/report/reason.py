"""The reason for a node's precision in words, and the edit that would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from autocastfx.errors import listed
from autocastfx.plan.plan import Forced, PlannedNode, Precision, Why
from autocastfx.plan.proposed_list import is_narrow, line_of, proposed_list
from autocastfx.report.text import reads_low
from autocastfx.report.view import Row

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Reason:
    """Of one node.

    Attributes:
        runs: the precision, and what brought it there.
        decided: category, reason and rule; empty, as are the next two, where no float32 value is at stake.
        placed: what around the node led to its precision, a clause each.
        change: what edit would change it.
        op_list: an op list, in YAML, that asks for the other precision; empty where no list decides.
    """

    runs: str
    decided: str = ""
    placed: tuple[str, ...] = ()
    change: str = ""
    op_list: str = ""


class Reasons:
    """The reasons of the nodes of one graph."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.name: row for row in rows}
        self._known = {row.name: row.planned for row in rows if row.planned is not None}
        self._sources = {row.name: self._behind_casts(row) for row in rows}
        self._readers: dict[str, list[str]] = {row.name: [] for row in rows}
        for row in rows:
            if row.kind in ("op", "output"):
                for source in self._sources[row.name]:
                    self._readers[source].append(row.name)

    def of(self, node: PlannedNode) -> Reason:
        """The reason of a planned node of the graph."""
        if node.placement.run is Precision.CAPTURED:
            return Reason(f"runs as captured: {node.decision.reason}")
        row = self._rows[node.name]
        reads = f", and its kernel {reads_low(row)}" if row.low_reads else ""
        runs = f"runs {node.placement.in_words}: {node.placement.because.clause}{reads}"
        placed, op_list = tuple(self._placed(node)), self._op_list(node)
        return Reason(runs, str(node.decision), placed, self._advice(node), op_list)

    def _op_list(self, node: PlannedNode) -> str:
        why = node.placement.because.why
        is_part = node.op == "getitem" or not node.dtype  # of what another op gives
        is_forced = isinstance(node.decision.source, Forced) or line_of(node) is not None
        if is_part or is_forced or why in (Why.SHARES_STORAGE, Why.FOLDED):
            return ""
        return proposed_list([node], "low" if node.placement.run is Precision.FLOAT32 else "float32")

    def _placed(self, node: PlannedNode) -> Iterator[str]:
        why, cause = node.placement.because.why, self._cause(node)
        if cause is not None:
            known = [self._known[name] for name in self._path(cause.name, node.name) if name in self._known]
            between = ", ".join(f"{one.name} ({one.decision.category})" for one in known)
            through = f"through {between}" if between else "directly"
            yield f"{cause.name} ({cause.op}) is {cause.decision}; reached {through}"
        elif why is Why.SHARES_STORAGE:
            yield "all that shares memory has one precision, and this memory is float32"
        elif why in (Why.FEWEST_BYTES, Why.INPUT_IS_FLOAT32, Why.NO_ALLOW_BEFORE, Why.FOLDED):
            yield f"it reads {self._around(self._sources[node.name])}"
            yield f"it is read by {self._around(self._readers[node.name])}"

    def _cause(self, node: PlannedNode) -> PlannedNode | None:
        """The node that draws ``node`` to float32, by running so before it."""
        because = node.placement.because
        return self._known.get(because.nodes[0]) if because.why is Why.AFTER else None

    def _around(self, names: Sequence[str]) -> str:
        rows = [self._rows[name] for name in names]
        said = [f"{row.name} ({row.precisions if row.planned is not None else row.kind})" for row in rows]
        return listed(said, 6) or "nothing"

    def _behind_casts(self, row: Row) -> list[str]:
        """The values that a node reads; of a cast that the conversion made, the value before it."""
        values: dict[str, None] = {}
        for read in row.reads:
            while self._rows[read].kind in ("cast", "copy", "made") and self._rows[read].reads:
                read = self._rows[read].reads[-1]
            values[read] = None
        return list(values)

    def _path(self, start: str, end: str) -> list[str]:
        """The nodes between ``start`` and ``end`` on a shortest way along the graph; nothing if there is none."""
        import networkx as nx

        try:
            return nx.shortest_path(self._graph, start, end)[1:-1]
        except nx.NetworkXNoPath:
            return []

    @cached_property
    def _graph(self) -> nx.DiGraph[str]:
        """An edge from each row to those that read it."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self._sources)
        graph.add_edges_from((source, name) for name, sources in self._sources.items() for source in sources)
        return graph

    def _advice(self, node: PlannedNode) -> str:
        source, cause, line = node.decision.source, self._cause(node), line_of(node)
        wanted = "float32" if node.placement.run is Precision.LOW else "low"
        ways = [f"set run to {wanted} in an edited plan, convert(plan=...)"]
        if node.module and not is_narrow(node):
            ways.insert(0, f"under modules the rule {{path: {node.module}, category: {wanted}}}")
        if isinstance(source, Forced):
            return source.remedy
        if node.placement.because.why is Why.SHARES_STORAGE:
            return "give what it writes into 16 bits in the model"
        if line is not None:
            return f"set run to {wanted} at {line}, in the plan given to convert"
        if cause is not None and isinstance(cause.decision.source, Forced):
            advice = cause.decision.source.remedy
            return f"{cause.name} draws it to float32, and {advice}; or {'; or '.join(ways)}"
        if cause is not None:
            ways.insert(0, f"{cause.op}, which draws it to float32, under infer or allow")
        where = f"{node.op} under {'deny' if wanted == 'float32' else 'allow'}"
        if is_narrow(node):
            where = f"under modules the rule {proposed_list([node], wanted).partition('- ')[2].rstrip()}"
        return f"write {where} in a list of your own; or {'; or '.join(ways)}"
