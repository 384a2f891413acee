"""``dump`` and ``show``: a converted model as text, in a file or as a page."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from autocastfx.errors import ArgumentError, ArgumentTypeError
from autocastfx.files import check_writable, write_whole
from autocastfx.plan.plan import Plan
from autocastfx.report.comparison import Comparison
from autocastfx.report.compiled_graph import views_of_enabled
from autocastfx.report.edits import best_edits
from autocastfx.report.formats import FORMATS, render
from autocastfx.report.html import model_facts, render_html
from autocastfx.report.text import TextOptions, check_names, render_text
from autocastfx.report.timing import Timing
from autocastfx.report.unfused import unfused_attention
from autocastfx.report.view import PredictedError, View, titled, view
from autocastfx.runtime.amp_module import AmpModule

# ``dump``: render a converted model as text, for people and for tools.

_SUFFIXES = {
    **{".dot": "dot", ".gv": "dot", ".graphml": "graphml", ".json": "json", ".py": "python"},
    **{".html": "html", ".htm": "html"},
}


class Dumped(str):
    """The text that :func:`dump` wrote into a file, or a page. A notebook or a prompt shows it as one line."""

    __slots__ = ("path",)

    path: str | None  # of the file

    def __new__(cls, text: str, path: str | None) -> Dumped:
        """Make it of a text, and of the path of the file that holds it; None if there is no file."""
        made = super().__new__(cls, text)
        made.path = path
        return made

    def __reduce__(self) -> tuple[type[Dumped], tuple[str, str | None]]:
        return type(self), (str(self), self.path)

    def __repr__(self) -> str:
        where = "print() shows it" if self.path is None else f"in {self.path}"
        return f"<dump of {len(self):,} characters, {where}>"


def dump(
    amp_model: nn.Module,
    path: str | os.PathLike[str] | None = None,
    format: str | None = None,
    *,
    comparison: Comparison | None = None,
    against: Plan | None = None,
    timing: Timing | None = None,
    width: int | None = 120,
    full: bool = False,
    only: str | None = None,
    module: str | None = None,
    summary: bool = False,
) -> str:
    """Show every node of a converted model with its precision and the reason, and every cast.

    Shows the variant of ``amp_model.graph`` and ``amp_model.plan``, the first captured for the model's present mode.
    ``"html"`` holds all variants, and shows this one or the compared one first; it is dated by SOURCE_DATE_EPOCH, else
    now. The text has no values, and is the same on every machine; of a model that was unpickled it has no shapes. Of an
    enabled model all graphs captured so far are shown, one after the other.

    Args:
        amp_model: a converted model, unpickled or not, or an enabled one.
        path: also write the text to this file, as UTF-8. An existing file is replaced when the text is complete.
        format: ``"text"``, an aligned table; ``"json"``, the plan, which :meth:`Plan.from_json` reads back; ``"dot"``,
            for Graphviz; ``"graphml"``, for graph tools; ``"python"``, the generated code with dtypes and precision
            as comments; or ``"html"``, a self-contained page for a browser that shows the graph by module and can be
            searched. By default that of the path's suffix (``.json``, ``.dot`` or ``.gv``, ``.graphml``, ``.py``,
            ``.html`` or ``.htm``), else ``"text"``.
        comparison: a result of :func:`compare` for ``amp_model``, shown on the page with the variant that was compared.
        against: the plan of the same model, converted in another way. The page marks the nodes that it decides or
            places differently, as :func:`diff` lists them, in the variant that is shown first.
        timing: a result of :func:`time` for the same model, for a tab of the page.
        width: of the text: the most characters of a line, at least 40. Names that are too long lose their middle, lists
            of casts and reasons their end; None shortens nothing.
        full: give each parameter, cast and other node of the text a line of its own; by default the line of an op tells
            of the casts that it reads.
        only: let the text show a part of the nodes: those of a precision (``"low"``, ``"float32"``, ``"captured"``,
            ``"given"``), of a category (``"deny"``) or of an op, or with ``"casts"`` those that read casts.
        module: let it show the nodes inside a module alone, by its path or a pattern as in op lists
            (``"layers.*.attn"``, ``"re:…"``).
        summary: let it count nodes by op and by module, and list none.

    Returns:
        The text, which ends with a newline. A notebook shows a page, or what was written to ``path``, as one line.

    Raises:
        ValueError: the format is unknown; ``only`` or ``module`` names nothing in the model, and the message suggests
            the nearest; an argument of the text is wrong, or given with another format; ``comparison``, ``against`` or
            ``timing`` is given with a format other than ``"html"``; ``comparison`` or ``against`` is of another model;
            this model lacks the variant that was compared; an enabled model has several graphs, and the format holds
            one; or the environment variable SOURCE_DATE_EPOCH is not a number.
        TypeError: ``amp_model`` is neither converted nor enabled, or ``comparison``, ``against`` or ``timing`` is
            something else.
        VariantError: nothing is captured yet.
        FileNotFoundError: the folder of ``path`` does not exist.
        IsADirectoryError: ``path`` is a folder.
        OSError: ``path`` cannot be written.
    """
    if format is None:
        format = _SUFFIXES.get(Path(path).suffix.lower(), "text") if path is not None else "text"
    if format not in FORMATS:
        raise ArgumentError(f"format is {', '.join(map(repr, FORMATS))}, not {format!r}")
    alone, apart = "leave it away, or print it by itself", "print autocastfx.diff(against, plan) instead"
    into_a_page: tuple[tuple[str, object, type, str, str], ...] = (
        ("comparison", comparison, Comparison, "what compare() returned", alone),
        ("against", against, Plan, "a plan, such as the other model's .plan", apart),
        ("timing", timing, Timing, "what time() returned", alone),
    )
    for name, given, kind, what, instead in into_a_page:
        if given is not None and not isinstance(given, kind):
            raise ArgumentTypeError(f"{name}= takes {what}, not a {type(given).__name__}")
        if given is not None and format != "html":
            raise ArgumentError(f"{name}= goes into format='html', not {format!r}: {instead}")
    options = TextOptions(width=width, full=full, only=only, module=module, summary=summary)
    if format != "text" and options != TextOptions(width=width):
        raise ArgumentError(f"full=, only=, module= and summary= are for the format 'text', not for {format!r}")
    if format == "text":
        text = dump_text(amp_model, options)
    else:
        text = _rendered(amp_model, format, comparison, against, timing)
    if path is not None:
        check_writable(Path(path))
        write_whole(Path(path), text)
    return Dumped(text, None if path is None else os.fspath(path)) if path is not None or format == "html" else text


def dump_text(amp_model: nn.Module, options: TextOptions) -> str:
    """Return the text of :func:`dump`.

    Raises:
        ValueError: ``only`` or ``module`` names nothing in the model.
        TypeError: ``amp_model`` is neither converted nor enabled.
        VariantError: nothing is captured yet.
    """
    views, shown = views_of(amp_model, "dump shows")
    views = [views[shown]] if isinstance(amp_model, AmpModule) else views
    check_names((row for one in views for row in one.rows), options.only, options.module)
    return "\n".join(render_text(one, options) for one in views)


def _rendered(
    amp_model: nn.Module, format: str, comparison: Comparison | None, against: Plan | None, timing: Timing | None
) -> str:
    views, shown = views_of(amp_model, "dump shows")
    if format == "html":
        facts = model_facts(amp_model)
        if isinstance(amp_model, AmpModule):
            edits = best_edits(amp_model, amp_model._shown[shown])
            facts["edits"] = [{"write": e.write, "where": e.where, "says": e.says, "effect": e.effect} for e in edits]
        return render_html(views, shown, comparison, facts, against, timing)
    if isinstance(amp_model, AmpModule):
        return render(views[shown], format)
    if len(views) == 1:
        return render(views[0], format)
    raise ArgumentError(
        f"this model has {len(views)} graphs, and {format!r} holds one: take 'text' or 'html', or dump one of "
        "autocastfx.backend_of(model).graphs"
    )


def views_of(model: object, does: str) -> tuple[list[View], int]:
    """Return views of all graphs of a converted or enabled model, and the position of the one to show first.

    ``does`` is what cannot be done with another model, for the error.

    Raises:
        TypeError: the model is neither.
        VariantError: nothing is captured yet.
    """
    if isinstance(model, AmpModule):
        return [_view(model, number) for number in range(len(model._shown))], _shown(model)
    if isinstance(model, nn.Module) and (views := views_of_enabled(model)) is not None:
        return views, 0
    if (advice := _of_torch_compile(model)) is not None:
        raise ArgumentTypeError(f"{does} what convert() returned, or what enable() was given. {advice}")
    raise ArgumentTypeError(
        f"{does} what convert() returned, or what enable() was given, not a {type(model).__name__}: convert or enable "
        "the model first"
    )


def _of_torch_compile(model: object) -> str | None:
    """Return what to show in the place of what torch.compile returned; None if it has returned something else."""
    inner = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", None))
    if isinstance(inner, AmpModule):
        return "This is a converted model that torch.compile has compiled: give the converted model itself."
    if inner is None and getattr(model, "_compiled_call_impl", None) is None:
        return None
    return (
        "This one is compiled by torch.compile, and does not say which plans its graphs have. Either convert it with "
        "autocastfx.enable(model) instead. Or make the backend yourself, backend = autocastfx.CompileBackend(), and "
        "compile with torch.compile(model, backend=backend): then each of backend.graphs has a plan, and dump()."
    )


def view_of(amp_model: AmpModule) -> View:
    """Return the view of the variant that ``amp_model`` shows."""
    return _view(amp_model, _shown(amp_model))


def _shown(amp_model: AmpModule) -> int:
    """Return the position of the variant that ``amp_model`` shows."""
    return amp_model._shown.index(amp_model._active)


def _view(amp_model: AmpModule, number: int) -> View:
    variants = amp_model._shown
    variant = variants[number]
    mode = "mixed modes" if variant.mode == "mixed" else f"{variant.mode} mode"
    which = f"{number + 1} of {len(variants)}, {mode}"
    words = f"{which}, called with {variant.structure}"
    shown = replace(titled(view(amp_model, variant, words), which), model=amp_model._original.class_name)
    if variant.fuse != "none":
        count, kinds = variant.regions
        shown = replace(shown, outside=(*shown.outside, f"regions: {count} of {kinds} kinds, compiled by Inductor"))
    if shown.plan.device == "cuda":
        told = (f"no fused attention takes {name}: {what}" for name, what in unfused_attention(variant.graph.nodes))
        shown = replace(shown, outside=(*shown.outside, *told))
    prices = amp_model._original.converter.prices
    measured = prices.sensitivity if prices is not None else None
    return shown if measured is None else replace(shown, predicted=PredictedError.by(measured, shown.mode))


# ``show``: the page of a converted model inside a notebook.

_SANDBOX = "allow-scripts allow-downloads allow-forms"  # the search is a form, and the page forbids to send it


@dataclass(frozen=True)
class Page:
    """The page that ``dump(model, format="html")`` writes. As the value of a notebook's cell it is shown there.

    Attributes:
        text: the page's HTML.
        height: of the frame that a notebook shows it in, in pixels.
    """

    text: str = field(repr=False)
    height: int = 700

    def _repr_html_(self) -> str:
        """The page in a frame that cannot reach the notebook."""
        return (
            f'<iframe title="Converted model" sandbox="{_SANDBOX}" allow="clipboard-write" width="100%" '
            f'height="{self.height}" frameborder="0" srcdoc="{html.escape(self.text)}"></iframe>'
        )


def show(
    model: nn.Module,
    *,
    comparison: Comparison | None = None,
    against: Plan | None = None,
    timing: Timing | None = None,
    height: int = 700,
) -> Page:
    """Make the page of a converted or enabled model for a notebook: the value of a cell shows it.

    Arguments are as for :func:`dump`, but for the height of the frame, in pixels.

    Raises:
        TypeError, ValueError, VariantError: as :func:`dump`.
    """
    return Page(dump(model, format="html", comparison=comparison, against=against, timing=timing), height)
