"""``dump``: render a converted model as text, for people and for tools."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from autocastfx.files import check_writable, write_whole
from autocastfx.report.compared import Compared
from autocastfx.report.dot import render_dot
from autocastfx.report.graphml import render_graphml
from autocastfx.report.html import render_html
from autocastfx.report.python import render_python
from autocastfx.report.text import render_text
from autocastfx.report.view import View, view
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["FORMATS", "dump", "render", "view_of"]


def _render_json(view: View) -> str:
    return view.plan.to_json() + "\n"


_OF_ONE_VARIANT: dict[str, Callable[[View], str]] = {
    "text": render_text,
    "json": _render_json,
    "dot": render_dot,
    "graphml": render_graphml,
    "python": render_python,
}
FORMATS = (*_OF_ONE_VARIANT, "html")


def dump(
    amp_model: AmpModule,
    path: str | os.PathLike[str] | None = None,
    format: str = "text",
    *,
    comparison: Compared | None = None,
) -> str:
    """Show every node of a converted model with its precision and the reason, and every cast.

    Shows the variant of ``amp_model.graph`` and ``amp_model.plan``, the first captured for the model's present mode.
    ``"html"`` holds all variants, and shows this one or the compared one first. The text has no sizes or values, and is
    the same on every machine.

    Args:
        amp_model: a converted model, unpickled or not.
        path: also write the text to this file, as UTF-8. An existing file is replaced when the text is complete.
        format: ``"text"``, an aligned table; ``"json"``, the plan, which :meth:`Plan.from_json` reads back; ``"dot"``,
            for Graphviz; ``"graphml"``, for graph tools; ``"python"``, the generated code with dtypes and precision
            as comments; or ``"html"``, a self-contained page for a browser that shows the graph by module and can be
            searched.
        comparison: a result of :func:`compare` for ``amp_model``, shown on the page with the variant that was compared.

    Returns:
        The text, which ends with a newline.

    Raises:
        ValueError: the format is unknown; or ``comparison`` is given with a format other than ``"html"``; or it is of
            another model, or of a variant that this model lacks.
        TypeError: ``amp_model`` is not a converted model, or ``comparison`` is not a comparison.
        VariantError: nothing is captured yet.
        FileNotFoundError: the folder of ``path`` does not exist.
        IsADirectoryError: ``path`` is a folder.
        OSError: ``path`` cannot be written.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {', '.join(map(repr, FORMATS))}, not {format!r}")
    if not isinstance(amp_model, AmpModule):
        raise TypeError(
            f"dump shows what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    if comparison is not None and not isinstance(comparison, Compared):
        raise TypeError(f"comparison= takes what compare() returned, not a {type(comparison).__name__}")
    if comparison is not None and format != "html":
        raise ValueError(f"comparison= goes into format='html', not {format!r}: leave it away, or print it by itself")
    if format == "html":
        views = [_view(amp_model, number) for number in range(len(amp_model._shown))]
        text = render_html(views, _shown(amp_model), comparison)
    else:
        text = render(view_of(amp_model), format)
    if path is not None:
        check_writable(Path(path))
        write_whole(Path(path), text)
    return text


def render(view: View, format: str) -> str:
    """Write one graph in a format of :func:`dump`.

    Raises:
        ValueError: the format is none of one graph.
    """
    if format not in _OF_ONE_VARIANT:
        raise ValueError(f"format is {', '.join(map(repr, _OF_ONE_VARIANT))}, not {format!r}")
    return _OF_ONE_VARIANT[format](view)


def view_of(amp_model: AmpModule) -> View:
    """Return the view of the variant that ``amp_model`` shows."""
    return _view(amp_model, _shown(amp_model))


def _shown(amp_model: AmpModule) -> int:
    """Return the position of the variant that ``amp_model`` shows."""
    graph = amp_model.graph
    return next(i for i, variant in enumerate(amp_model._shown) if variant.graph is graph)


def _view(amp_model: AmpModule, number: int) -> View:
    variants = amp_model._shown
    variant = variants[number]
    mode = "mixed modes" if variant.mode == "mixed" else f"{variant.mode} mode"
    what = "draft " if variant.plan.unverified else ""
    return view(amp_model, variant, f"{what}{number + 1} of {len(variants)}, {mode}, called with {variant.structure}")
