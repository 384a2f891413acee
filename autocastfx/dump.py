"""``dump``: a converted model as text, for people and for tools."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from autocastfx.amp_module import AmpModule
from autocastfx.report.dot import render_dot
from autocastfx.report.graphml import render_graphml
from autocastfx.report.python import render_python
from autocastfx.report.text import render_text
from autocastfx.report.view import View, view

__all__ = ["FORMATS", "dump", "view_of"]


def _render_json(view: View) -> str:
    return view.plan.to_json() + "\n"


FORMATS: dict[str, Callable[[View], str]] = {
    "text": render_text,
    "json": _render_json,
    "dot": render_dot,
    "graphml": render_graphml,
    "python": render_python,
}


def dump(amp_model: AmpModule, path: str | os.PathLike[str] | None = None, format: str = "text") -> str:
    """What was decided for a converted model: every node, its precision and why, and every cast.

    Shows the variant that ``amp_model.graph`` and ``amp_model.plan`` show: the first that was captured for the model's
    present mode. Sizes and values are not shown, and the text is the same on every machine.

    Args:
        amp_model: what :func:`convert` returned, or such a model unpickled.
        path: also write the text here, as UTF-8; a file that is there already is replaced once the text is complete.
        format: ``"text"``, an aligned table; ``"json"``, the plan, which :meth:`Plan.from_json` reads back; ``"dot"``,
            for Graphviz; ``"graphml"``, for graph tools; or ``"python"``, the generated code with dtypes and precision
            as comments.

    Returns:
        The text, which ends with a newline.

    Raises:
        ValueError: the format is unknown.
        TypeError: ``amp_model`` is no converted model.
        VariantError: nothing is captured yet.
        FileNotFoundError: the folder of ``path`` does not exist.
        OSError: ``path`` cannot be written.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {', '.join(map(repr, FORMATS))}, not {format!r}")
    if not isinstance(amp_model, AmpModule):
        raise TypeError(
            f"dump shows what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    text = FORMATS[format](view_of(amp_model))
    if path is not None:
        _write(Path(path), text)
    return text


def view_of(amp_model: AmpModule) -> View:
    """The variant that ``amp_model`` shows, for the renderers."""
    plan, graph = amp_model.plan, amp_model.graph
    variants = amp_model.shown
    number, shown = next((i, v) for i, v in enumerate(variants, 1) if v.graph is graph)
    mode = "train mode" if all(shown.modes) else "mixed modes" if any(shown.modes) else "eval mode"
    inputs = [leaf[1] for leaf in shown.structure.leaves if leaf[0] == "tensor"]
    what = "draft " if plan.unverified else ""
    words = f"{what}{number} of {len(variants)}, {mode}, called with {shown.structure}"
    return view(amp_model, plan, inputs, words)


def _write(path: Path, text: str) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
