"""Render a converted model as a self-contained page for a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from autocastfx.plan.plan import Plan
from autocastfx.report.comparison import Comparison
from autocastfx.report.model_facts import ModelFacts
from autocastfx.report.page_data import page_data
from autocastfx.report.view import View

__all__ = ["SCRIPTS", "asset", "render_html"]

SCRIPTS = (
    "viz-standalone.js",
    *(
        "words.js",
        "repeats.js",
        "model.js",
        "heat.js",
        "box.js",
        "layout.js",
        "drawing.js",
        "viewport.js",
        "minimap.js",
    ),
    *(
        "picture.js",
        "elements.js",
        "panel.js",
        "tables.js",
        "tabs.js",
        "search.js",
        "head.js",
        "marks.js",
        "keyboard.js",
        "address.js",
        "page.js",
    ),
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render_html(
    views: Sequence[View],
    shown: int,
    comparison: Comparison | None = None,
    facts: ModelFacts | None = None,
    against: Plan | None = None,
) -> str:
    """Render HTML 5 with styles, scripts, Graphviz as WebAssembly, and the data inside.

    A Content-Security-Policy allows the scripts and styles by their hashes, and no requests.

    Args:
        views: all variants of a model.
        shown: position of the variant to show first if there is no comparison.
        comparison: a result of ``compare``; the variant compared is shown first, with its numbers.
        facts: of the model as a whole, for the head of the page.
        against: another plan, whose decisions are told where they differ.

    Raises:
        ValueError: the comparison is of another model, or of a variant that this model lacks; or ``against`` is of
            another model.
    """
    scripts, style = [asset(name) for name in SCRIPTS], asset("page.css")
    data = page_data(views, shown, comparison, facts, against)
    parts = {
        "title": html.escape(f"{_name(facts)}: {views[data['shown']].variant}"),
        "policy": html.escape(_policy(scripts, [style])),
        "style": style,
        "notices": asset("viz-standalone.LICENSES.txt").replace("--", "- -"),  # "--" would end a comment
        "data": _json(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return _PLACE.sub(lambda place: parts[place[1]], asset("page.html"))


def _name(facts: ModelFacts | None) -> str:
    return facts.name if facts is not None and facts.name else "autocastfx"


def asset(name: str) -> str:
    """Read a text file of the folder ``assets``."""
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
    """Write JSON in which a browser finds no end of the script and no comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
