"""Render a converted model as a self-contained page for a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from autocastfx.errors import ArgumentError
from autocastfx.files import NON_FINITE_AS_TEXT, plain_data
from autocastfx.plan.plan import Plan, PlannedNode, Precision
from autocastfx.plan.plan_diff import diff
from autocastfx.report.comparison import Comparison, Deviation, compared_variant
from autocastfx.report.compiled_graph import fold_of
from autocastfx.report.headline import brief_reason, headline, headline_data
from autocastfx.report.packed import packed
from autocastfx.report.reason import Reasons
from autocastfx.report.text import summary
from autocastfx.report.timing import Timing
from autocastfx.report.view import Row, View, float8_clauses, in_numbers
from autocastfx.runtime.amp_module import AmpModule

# The part of the page's data that tells how another plan decides: by node, and for the graph.


def _add_changes(variant: dict[str, Any], against: Plan, plan: Plan) -> None:
    """Add what another plan says to the data of a variant, and of each node that differs; of one it lacks, nothing."""
    difference = diff(against, plan)
    if plan.nodes and len(difference.added) == len(plan.nodes):
        raise ArgumentError(
            "the plan given as against= is of another model or graph: no node of it is in the one shown. Give the plan "
            "of the same model, converted in another way."
        )
    removed = [{"name": n.name, "op": n.op, "module": n.module, "decided": str(n.decision)} for n in difference.removed]
    variant["changes"] = {"summary": difference.summary, **({"removed": removed} if removed else {})}
    changed: dict[str, dict[str, Any]] = {node.name: {"added": True} for node in difference.added}
    for pair in difference.changed:
        node, because = pair.before, str(pair.before.placement.because)
        said = {"runs": str(node.placement), "because": because, "decided": str(node.decision), "moved": pair.moved}
        changed[pair.name] = _present(said)
    for node in variant["nodes"]:
        if node["name"] in changed:
            node["before"] = changed[node["name"]]


# Facts about a converted model and its page, for the header of the page.

_DATE = "SOURCE_DATE_EPOCH"  # https://reproducible-builds.org/specs/source-date-epoch


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Collect the facts of a converted or enabled model as a whole, those that are known.

    ``name`` is the class of the original, which a converted model that was unpickled does not know; ``parameters`` the
    number of elements of all parameters, tied ones counted once; ``fold`` the level of folding; ``date`` that of now,
    or of SOURCE_DATE_EPOCH; ``autocastfx`` and ``torch`` their versions.

    Raises:
        ValueError: the environment variable SOURCE_DATE_EPOCH is not a number of seconds.
    """
    original = model._original.model if isinstance(model, AmpModule) else model
    facts = {
        "name": type(original).__name__ if original is not None else "",
        "parameters": sum(p.numel() for p in model.parameters()),
        "fold": model._original.converter.fold if isinstance(model, AmpModule) else fold_of(model),
        "date": _date(os.environ.get(_DATE)),
        "autocastfx": version("autocastfx"),
        "torch": str(torch.__version__),
    }
    return _present(facts)


def _date(seconds: str | None) -> str:
    try:
        moment = datetime.now(timezone.utc) if not seconds else datetime.fromtimestamp(int(seconds), timezone.utc)
    except (ValueError, OverflowError, OSError) as error:
        raise ArgumentError(
            f"{_DATE} is {seconds!r}, which is not a number of seconds since 1970: set it to one, or unset it"
        ) from error
    return f"{moment:%Y-%m-%d %H:%M} UTC"


# The data of the HTML page: the variants of a model, their nodes, and the modules that contain these.

_HELD = ("parameter", "buffer")


def page_data(
    views: Sequence[View],
    shown: int,
    comparison: Comparison | None = None,
    facts: Mapping[str, Any] | None = None,
    against: Plan | None = None,
    timing: Timing | None = None,
) -> dict[str, Any]:
    """Return the page's data: ``{"format": 1, "shown": …, "model": {…}, "timing": {…}, "variants": […]}``.

    Empty fields are left out. A variant holds its ``title``, ``summary``, ``low``, ``device``, ``op_list``,
    ``unlisted`` ops, ``modules`` (the root first, each with its name and the number of its parent), ``nodes``, which
    refer to each other and to modules by number, the numbers of its ``parameters``' gradients, and where its error
    begins (``begin``).

    Args:
        views: all variants.
        shown: position of the variant to show first if there is no comparison.
        comparison: a result of ``compare``; the variant compared is shown first, with its numbers.
        facts: of the model as a whole.
        against: another plan, whose decisions are told of the variant that is shown first, where they differ.
        timing: a result of ``time``.

    Raises:
        ValueError: no variant is the one that was compared, or it lacks a compared node; or ``against`` is of another
            model.
    """
    shown = shown if comparison is None else compared_variant(views, comparison)
    variants = [_variant(view, comparison if i == shown else None) for i, view in enumerate(views)]
    if against is not None:
        _add_changes(variants[shown], against, views[shown].plan)
    model = {"model": dict(facts)} if facts is not None else {}
    timed = {"timing": timing.page_data()} if timing is not None else {}
    return {"format": 1, "shown": shown, **model, **timed, "variants": variants}


def _variant(view: View, comparison: Comparison | None) -> dict[str, Any]:
    values = comparison.nodes if comparison is not None else ()
    numbers = {n.name: {**_numbers(n), **({"gradient": _numbers(n.gradient)} if n.gradient else {})} for n in values}
    parameters, begins = (comparison.parameters, comparison.begins) if comparison is not None else ((), None)
    begin = _present({"says": begins.says, "node": begins.node, "failing": begins.is_failure}) if begins else None
    # nodes refer to modules, reasons and each other by number, which keeps the page small
    rows = [_portable(row) for row in view.rows]
    reasons, homes, whys = Reasons(rows), _Homes(rows), dict[str, int]()  # each reason once, with a number from 1
    known = {row.name: row.planned for row in rows if row.planned is not None}
    places = {row.name: i for i, row in enumerate(rows)}
    nodes = [
        _present(
            {
                **_node(row, reasons),
                "why": _why(row, known, whys),
                "passive": row.kind == "op" and not row.computes,
                **_predicted(row, view),
                **_kept(row, view),
                "float8": tuple(float8_clauses(row.planned, view.plan.quantized)) if row.planned is not None else (),
                "numerics": numbers.get(row.name),
            }
        )
        for row in rows
    ]
    for row, node in zip(rows, nodes, strict=True):
        node["in"] = homes.of(row)
        reads = [*row.reads, *(f"{inner}/output" for inner in row.runs)]
        node["reads"] = [places[read] for read in reads if read in places]
    return {
        "title": view.title or view.variant,
        "headline": headline_data(headline(view)),
        "low": view.plan.low,
        "device": view.plan.device,
        "op_list": view.plan.op_list,
        "summary": summary(view),
        "unlisted": view.plan.unlisted,
        "whys": list(whys),
        "modules": homes.table,
        "nodes": nodes,
        **({"parameters": [{"name": one.name, **_numbers(one)} for one in parameters]} if parameters else {}),
        **({"begin": begin} if begin is not None else {}),
    }


def _why(row: Row, known: Mapping[str, PlannedNode], whys: dict[str, int]) -> int | None:
    """Return the number of a row's reason; None if no precision is at stake."""
    if row.planned is None or row.precision is Precision.CAPTURED:
        return None
    return whys.setdefault(brief_reason(row.planned, known), len(whys) + 1)


def _portable(row: Row) -> Row:
    if row.planned is None or row.decision is None:
        return row
    return replace(row, planned=replace(row.planned, decision=row.decision))


def _node(row: Row, reasons: Reasons) -> dict[str, Any]:
    data: dict[str, Any] = {"name": row.name, "kind": row.kind, "op": row.op, "dtype": row.dtype, "shade": _shade(row)}
    shape = in_numbers(row.shape)
    data |= {
        "shape": shape,
        "symbols": row.shape if row.shape != shape else "",
        "size": row.bytes or "",
        "attributes": row.attributes,
    }
    if row.line is not None:
        data["line"] = f"{row.line.file}:{row.line.number}"
        data["code"] = row.line.code
    if row.planned is not None:
        decision, reason = row.planned.decision, reasons.of(row.planned)
        data |= {"module": row.planned.module, "own": row.is_own_cast, "runs": row.precisions, "says": reason.runs}
        data |= {"because": str(row.planned.placement.because), "category": str(decision.category)}
        data |= {"reason": decision.reason, "source": str(decision.source)}
        data |= {"placed": reason.placed, "change": reason.change, "list": reason.op_list}
    if row.cast is not None:
        data |= {"of": row.cast.value, "bytes": row.cast.bytes, "saturates": row.cast.saturates, "to": row.cast.dtype}
    if row.copy is not None:
        data |= {"of": row.copy.parameter, "to": row.copy.dtype}
    if row.mark is not None and row.kind == "made":
        data["says"] = f"made by {row.mark.made_by} ({row.mark.rule}), for {row.mark.value}"
    return data


def _predicted(row: Row, view: View) -> dict[str, Any]:
    """Return what was measured for a node: the error of its placement, and what is said of it."""
    if row.planned is None:
        return {}
    prediction: dict[str, Any] = {"predicts": " ".join(view.predicted.sentences(row.planned))}
    if row.planned.error is not None:
        prediction["predicted"] = row.planned.error
    if row.planned.effect:
        prediction["effect"] = [float(f"{number:.3g}") for number in row.planned.effect]
    return prediction


def _kept(row: Row, view: View) -> dict[str, Any]:
    """Return how, and in how many bytes, what a node gives is kept for backward, if a list has rules on that."""
    if row.planned is None or not (parts := [one for one in view.plan.saved if one.name == row.planned.name]):
        return {}
    return {"backward": tuple(map(str, parts)), "kept": sum(one.kept for one in parts)}


def _shade(row: Row) -> str:
    """Return the shade that a node is drawn in: an op's precision, ``other`` or ``mixed``; empty for other nodes."""
    if row.planned is None:
        return ""
    run, store = row.planned.placement.run, row.planned.placement.store
    if run is Precision.CAPTURED:
        return "other"
    return str(run) if run is store else "mixed"


def _present(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value not in ("", None, False, ())}


def _numbers(deviation: Deviation) -> dict[str, float | str]:
    names = ("error", "overflow", "underflow", "zeros", "nan")
    return plain_data({name: getattr(deviation, name) for name in names}, NON_FINITE_AS_TEXT)


class _Homes:
    """The module of each row. A sub-graph counts as a module inside the one that runs it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.table: list[dict[str, Any]] = [{"name": "", "around": -1}]
        self._numbers: dict[tuple[int, str, bool], int] = {}
        self._around: dict[str, tuple[int, str]] = {"": (0, "")}  # by graph: its number, and the path of its runner
        self._known: dict[str, int] = {}
        readers: dict[str, list[Row]] = {}
        for row in rows:
            for read in row.reads:
                readers.setdefault(read, []).append(row)
        for row in rows:
            if row.planned is not None or row.kind in ("input", "output", "sub-graph"):
                self._known[row.name] = home = self._path(row.name.rpartition("/")[0], row.module)
                for inner in row.runs:
                    self._around[inner] = (self._child(home, inner.rpartition("/")[2], runs=True), row.module)
        for row in reversed(rows):  # from readers back to what they read
            if row.name not in self._known:
                self._known[row.name] = self._beside(row, readers.get(row.name, ()))

    def of(self, row: Row) -> int:
        return self._known[row.name]

    def _path(self, graph: str, module: str) -> int:
        number, runner = self._around.get(graph, (0, ""))
        inside = module.removeprefix(runner) if runner and f"{module}.".startswith(f"{runner}.") else module
        for name in filter(None, inside.split(".")):
            number = self._child(number, name)
        return number

    def _child(self, around: int, name: str, *, runs: bool = False) -> int:
        key = (around, name, runs)
        if key not in self._numbers:
            self._numbers[key] = len(self.table)
            self.table.append({"name": name, "around": around, **({"runs": True} if runs else {})})
        return self._numbers[key]

    def _beside(self, row: Row, readers: Iterable[Row]) -> int:
        """Return a parameter's own module if that has nodes; else, as for constants and casts, a reader's module."""
        graph = row.name.rpartition("/")[0]
        if row.kind in _HELD and not graph:
            number = 0
            for name in row.op.split(".")[:-1]:
                number = self._numbers.get((number, name, False), -1)
            if number > 0:
                return number
        homes = Counter(self._known[reader.name] for reader in readers if reader.kind != "output")
        return min(homes) if homes else self._around.get(graph, (0, ""))[0]


SCRIPTS = (
    "viz-standalone.js",
    "packed.js",
    "words.js",
    "repeats.js",
    "model.js",
    "heat.js",
    "box.js",
    "layout.js",
    "drawing.js",
    "viewport.js",
    "minimap.js",
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
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render_html(
    views: Sequence[View],
    shown: int,
    comparison: Comparison | None = None,
    facts: Mapping[str, Any] | None = None,
    against: Plan | None = None,
    timing: Timing | None = None,
) -> str:
    """Render HTML 5 with styles, scripts, Graphviz as WebAssembly, and the data inside: that of :func:`page_data`.

    A Content-Security-Policy allows the scripts and styles by their hashes, and no requests.

    Raises:
        ValueError: as for :func:`page_data`.
    """
    scripts, style = [asset(name) for name in SCRIPTS], asset("page.css")
    data = page_data(views, shown, comparison, facts, against, timing)
    data["variants"] = [{**variant, "nodes": packed(variant["nodes"])} for variant in data["variants"]]
    name = (facts or {}).get("name", "autocastfx")
    parts = {
        "title": html.escape(f"{name}: {views[data['shown']].variant}"),
        "policy": html.escape(_policy(scripts, [style])),
        "style": style,
        "notices": asset("viz-standalone.LICENSES.txt").replace("--", "- -"),  # "--" would end a comment
        "data": _json(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return _PLACE.sub(lambda place: parts[place[1]], asset("page.html"))


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
