"""Render a converted graph for Graphviz. Shape, colour and text show the precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autocastfx.plan.plan import Precision
from autocastfx.report.predicted_error import error_cell
from autocastfx.report.row import Row
from autocastfx.report.summary import summary
from autocastfx.report.view import View

__all__ = ["render_dot"]

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
        yield f"{indent}{_text(row.name)} [{_dot_attributes(_look(row))}];"
        for inner in row.runs:
            yield f"{indent}subgraph {_text(f'cluster_{inner}')} {{"
            yield f"{indent}  label={_text(f'{inner}, run by {row.name}')};"
            yield from _cluster(rows, inner, depth + 1)
            yield f"{indent}}}"


def _look(row: Row) -> dict[str, str]:
    base = _OPS[row.precision] if row.kind == "op" else _KINDS[row.kind]
    return {"label": "\n".join(_label(row)), **base}


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


def _dot_attributes(look: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={_text(value)}" for key, value in look.items())


def _text(plain: str, *, left: bool = False) -> str:
    r"""Quote ``plain`` for Graphviz; with ``left``, lines end with ``\l``, which aligns them to the left."""
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + (escaped.replace("\n", "\\l") + "\\l" if left else escaped.replace("\n", "\\n")) + '"'
