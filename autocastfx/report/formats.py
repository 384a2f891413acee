"""The text formats of ``dump`` for one graph: for Graphviz, as GraphML, as Python code, and as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autocastfx.errors import ArgumentError
from autocastfx.plan.plan import Precision
from autocastfx.report.text import render_text, summary
from autocastfx.report.view import Row, View, error_cell

# Render a converted graph for Graphviz. Shape, colour and text show the precision.

# Fill colours of Okabe and Ito's palette, lightened; they differ in lightness too.
_OPS = {
    Precision.LOW: {"shape": "box", "style": "filled,bold", "fillcolor": "#9fd3f2"},
    Precision.FLOAT32: {"shape": "ellipse", "style": "filled", "fillcolor": "#f6c56f"},
    Precision.CAPTURED: {"shape": "plain"},
    Precision.GIVEN: {"shape": "box", "style": "rounded"},
}
_KINDS = {
    "input": {"shape": "invhouse"},
    "parameter": {"shape": "note"},
    "buffer": {"shape": "note", "style": "dashed"},
    "constant": {"shape": "note", "style": "dotted"},
    "sub-graph": {"shape": "folder"},
    "cast": {"shape": "diamond", "style": "filled", "fillcolor": "#ffffff", "fontsize": "9"},
    "copy": {"shape": "diamond", "style": "filled,dashed", "fillcolor": "#ffffff", "fontsize": "9"},
    "made": {"shape": "diamond", "style": "dashed", "fontsize": "9"},
    "output": {"shape": "house"},
}


def render_dot(view: View) -> str:
    """Render a ``digraph``. Identifiers are node names; a sub-graph is a cluster of its name."""
    title = "\n".join(summary(view))
    lines = [
        "digraph autocastfx {",
        f'  graph [label={_text(title, left=True)}, labelloc=t, labeljust=l, fontname="monospace"];',
        '  node [fontname="sans-serif", fontsize=11];',
        '  edge [fontname="sans-serif", fontsize=9];',
        *_cluster([row for row in view.rows if row.kind != "removed"], "", 1),
        *(f"  {edge}" for row in view.rows for edge in _edges(row)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _cluster(rows: Sequence[Row], prefix: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for row in (r for r in rows if r.name.rpartition("/")[0] == prefix):
        look = {"label": "\n".join(_label(row)), **(_OPS[row.precision] if row.kind == "op" else _KINDS[row.kind])}
        yield f"{indent}{_text(row.name)} [{', '.join(f'{key}={_text(value)}' for key, value in look.items())}];"
        for inner in row.runs:
            yield f"{indent}subgraph {_text(f'cluster_{inner}')} {{"
            yield f"{indent}  label={_text(f'{inner}, run by {row.name}')};"
            yield from _cluster(rows, inner, depth + 1)
            yield f"{indent}}}"


def _label(row: Row) -> list[str]:
    if row.cast is not None:
        return ["cast" + (", saturating" if row.cast.saturates else ""), row.dtype]
    if row.copy is not None:
        return ["working copy", row.dtype]
    if row.kind != "op":
        lines = [row.kind, row.op or row.name, row.dtype]
    elif row.planned is None:
        lines = [row.name, row.op, "not in the plan"]
    else:
        own = "the model's own cast" if row.is_own_cast else ""
        title = row.name if row.name == row.op else f"{row.name}: {row.op}"
        error = f"error {error_cell(row.planned.error)}" if row.planned.error is not None else ""
        lines = [title, row.planned.module, f"runs {row.precisions}", row.dtype, error, own]
    return [line for line in lines if line]


def _edges(row: Row) -> Iterator[str]:
    for read in row.reads:
        yield f"{_text(read)} -> {_text(row.name)};"
    for inner in row.runs:
        yield f"{_text(f'{inner}/output')} -> {_text(row.name)} [style=dotted, label={_text('gives')}];"


def _text(plain: str, *, left: bool = False) -> str:
    r"""Quote ``plain`` for Graphviz; with ``left``, lines end with ``\l``, which aligns them to the left."""
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + (escaped.replace("\n", "\\l") + "\\l" if left else escaped.replace("\n", "\\n")) + '"'


# Render a converted graph as GraphML, for yEd, Gephi, Cytoscape and networkx.


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
        for inner in row.runs:
            inside = (other.name for other in view.rows if other.name.rpartition("/")[0] == inner)
            graph.add_edges_from((row.name, name) for name in inside)
    return "\n".join(nx.generate_graphml(graph, named_key_ids=True)) + "\n"


def _graphml_attributes(row: Row) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {"kind": row.kind, "op": row.op, "dtype": row.dtype}
    if row.planned is not None:
        decision, placement = row.planned.decision, row.planned.placement
        attributes |= {"module": row.planned.module, "runs": str(placement.run), "stored": str(placement.store)}
        attributes |= {"because": str(placement.because), "category": str(decision.category)}
        attributes |= {"reason": decision.reason, "source": str(decision.source)}
        attributes |= {"error": row.planned.error} if row.planned.error is not None else {}
    if row.cast is not None:
        attributes |= {"of": row.cast.value, "bytes": row.cast.bytes, "saturates": str(row.cast.saturates)}
    return attributes


# Render the generated code of a converted graph, with each node's dtypes and precision in a comment.

_LEGEND = "comments: precision: dtype as captured → now (category); + made by the conversion, * the model's own cast"
_ASSIGNMENT = re.compile(r"^ {4}(\w+)\b[^=;]*=(?!=)")


def render_python(view: View) -> str:
    """Render Python source: the header as comments, ``forward`` as torch.fx generates it, then the sub-graphs'."""
    rows = {row.name: row for row in view.rows}
    parts = [[f"# {line}" for line in (*summary(view), _LEGEND)]]
    for prefix, code in view.codes.items():
        title = [f"# sub-graph {prefix.removesuffix('/')}"] if prefix else []
        parts.append([*title, *_commented(code, rows, prefix)])
    return "\n\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _commented(code: str, rows: Mapping[str, Row], prefix: str) -> list[str]:
    lines: list[str] = []
    for line in code.strip().splitlines():
        assigned = _ASSIGNMENT.match(line)
        row = rows.get(prefix + assigned[1]) if assigned else None
        comment = _comment(row) if row is not None else ""
        lines.append(f"{line}  # {comment}" if comment else line.rstrip())
    return lines


def _comment(row: Row) -> str:
    if row.cast is not None:
        saturates = ", saturating" if row.cast.saturates else ""
        return f"+ cast of {row.cast.value}: {row.dtype}{saturates}"
    if row.copy is not None:
        return f"+ working copy of {row.copy.parameter}: {row.dtype}"
    if row.mark is not None:
        return f"+ for {row.mark.value}, by {row.mark.made_by} ({row.mark.rule})"
    if row.kind != "op":
        return f"{row.kind} {row.dtype}".rstrip()
    if row.planned is None:
        return "not in the plan"
    own = "* " if row.is_own_cast else ""
    category = "" if row.precision is Precision.CAPTURED else f" ({row.planned.decision.category})"
    return f"{own}{row.precisions}: {row.dtype or 'no tensor'}{category}"


# The text formats of ``dump``, for one graph.


_OF_ONE_GRAPH: dict[str, Callable[[View], str]] = {
    "text": render_text,
    "json": lambda view: view.plan.to_json() + "\n",
    "dot": render_dot,
    "graphml": render_graphml,
    "python": render_python,
}
FORMATS = (*_OF_ONE_GRAPH, "html")  # the last holds all graphs of a model


def render(view: View, format: str) -> str:
    """Write one graph in a format of :func:`dump`.

    Raises:
        ValueError: the format is none of one graph.
    """
    if format not in _OF_ONE_GRAPH:
        raise ArgumentError(f"format is {', '.join(map(repr, _OF_ONE_GRAPH))}, not {format!r}")
    return _OF_ONE_GRAPH[format](view)
