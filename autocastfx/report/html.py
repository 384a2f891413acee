"""A converted model as one page for a browser, which asks for no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from autocastfx.report.compared import Compared
from autocastfx.report.page_data import page_data
from autocastfx.report.view import View

__all__ = ["SCRIPTS", "asset", "render_html"]

SCRIPTS = ("viz-standalone.js", "model.js", "drawing.js", "viewport.js", "panel.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render_html(views: Sequence[View], shown: int, comparison: Compared | None = None) -> str:
    """HTML 5: the styles, the scripts, Graphviz as WebAssembly, and the data, all inside.

    A Content-Security-Policy admits the scripts and styles by their hashes, and no request at all.

    Args:
        views: of all variants of a model.
        shown: which of them is shown first, where there is no comparison.
        comparison: what ``compare`` returned; the variant that it is of is shown first, with its numbers.

    Raises:
        ValueError: the comparison is of another model, or of a variant that this one has not.
    """
    scripts, style = [asset(name) for name in SCRIPTS], asset("page.css")
    data = page_data(views, shown, comparison)
    parts = {
        "title": html.escape(f"autocastfx: {views[data['shown']].variant}"),
        "policy": html.escape(_policy(scripts, [style])),
        "style": style,
        "notices": asset("viz-standalone.LICENSES.txt").replace("--", "- -"),  # which would end a comment
        "data": _json(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return _PLACE.sub(lambda place: parts[place[1]], asset("page.html"))


def asset(name: str) -> str:
    """The text of a file in ``assets``."""
    return (files("autocastfx.report") / "assets" / name).read_bytes().decode("utf-8")


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'wasm-unsafe-eval' {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: Any) -> str:
    """JSON that no browser takes for the end of its script, or for a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
