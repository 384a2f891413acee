"""The text formats of ``dump``, for one graph."""

from __future__ import annotations

from collections.abc import Callable

from autocastfx.report.dot import render_dot
from autocastfx.report.graphml import render_graphml
from autocastfx.report.python import render_python
from autocastfx.report.text import render_text
from autocastfx.report.view import View

__all__ = ["FORMATS", "render"]


def _render_json(view: View) -> str:
    return view.plan.to_json() + "\n"


_OF_ONE_GRAPH: dict[str, Callable[[View], str]] = {
    "text": render_text,
    "json": _render_json,
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
        raise ValueError(f"format is {', '.join(map(repr, _OF_ONE_GRAPH))}, not {format!r}")
    return _OF_ONE_GRAPH[format](view)
