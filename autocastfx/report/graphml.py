"""Render a converted graph as GraphML, for yEd, Gephi, Cytoscape and networkx."""

from __future__ import annotations

from typing import Any

from autocastfx.report.row import Row
from autocastfx.report.summary import summary
from autocastfx.report.view import View

__all__ = ["render_graphml"]


def render_graphml(view: View) -> str:
    """Render GraphML 1.0: a node for each line of the text dump, and an edge for each value read.

    The columns are attributes of the nodes, and the header is the graph's attribute ``summary``. A node that the
    conversion removed has no edges.
    """
    import networkx as nx

    graph: Any = nx.DiGraph(summary="\n".join(summary(view)))
    for row in view.rows:
        graph.add_node(row.name, **_graphml_attributes(row))
    for row in view.rows:
        graph.add_edges_from((read, row.name) for read in row.reads)
        graph.add_edges_from((row.name, other.name) for other in view.rows if _runs(row, other))
    return "\n".join(nx.generate_graphml(graph, named_key_ids=True)) + "\n"


def _runs(row: Row, other: Row) -> bool:
    """True if ``other`` is in a sub-graph that ``row`` runs."""
    return other.name.rpartition("/")[0] in row.runs if row.runs else False


def _graphml_attributes(row: Row) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {"kind": row.kind, "op": row.op, "dtype": row.dtype}
    if row.planned is not None:
        decision, placement = row.planned.decision, row.planned.placement
        found |= {"module": row.planned.module, "runs": str(placement.run), "stored": str(placement.store)}
        found |= {"because": str(placement.because), "category": str(decision.category)}
        found |= {"reason": decision.reason, "source": str(decision.source)}
        found |= {"error": row.planned.error} if row.planned.error is not None else {}
    if row.cast is not None:
        found |= {"of": row.cast.value, "bytes": row.cast.bytes, "saturates": str(row.cast.saturates)}
    return found
