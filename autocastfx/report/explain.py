"""``explain``: say in words why a node runs in its precision, and which edit would change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from autocastfx.errors import ArgumentTypeError
from autocastfx.graph.cell import preformatted
from autocastfx.plan.plan import Plan, PlannedCast, PlannedCopy, PlannedNode, Recomposed, select
from autocastfx.report.dump import views_of
from autocastfx.report.reason import Reason, Reasons
from autocastfx.report.view import View, float8_clauses
from autocastfx.runtime.amp_module import AmpModule


def explain(amp_model: nn.Module, what: str) -> Explanation:
    """Explain why the nodes that ``what`` names run in their precision, and what would change it.

    Args:
        amp_model: a converted model, of which the variant of its ``plan`` is explained; or an enabled one, of which all
            graphs are, each explanation once.
        what: a node, an op, a module, or an op inside a module; paths may be patterns (``layers.*.attn.softmax``). Of a
            cast or the read of a copy it tells who reads it, and why these run so.

    Returns:
        A paragraph for each node, as text that a notebook's cell shows, too; nodes without float32 values are only
        named.

    Raises:
        KeyError: nothing in the plan has this name; the message suggests the nearest.
        TypeError: ``amp_model`` is neither converted nor enabled, or ``what`` is not text.
        VariantError: nothing is captured yet.
    """
    views, first = views_of(amp_model, "explain takes")
    if not isinstance(what, str):
        raise ArgumentTypeError(f"explain takes the name of a node, op or module, such as 'softmax', not {what!r}")
    chosen = [views[first]] if isinstance(amp_model, AmpModule) else views
    paragraphs, unknown = dict[str, None](), list[KeyError]()
    for one in chosen:
        try:
            paragraphs.update(dict.fromkeys(_paragraphs(one, what)))
        except KeyError as error:
            unknown.append(error)
    if not paragraphs:
        raise unknown[0]
    return Explanation("\n".join(part for paragraph in paragraphs for part in (paragraph, "")))


class Explanation(str):
    """A text that a notebook's cell shows line by line. In all else a ``str``."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _paragraphs(shown: View, what: str) -> Iterator[str]:
    reasons = Reasons(shown.rows)
    recomposed = {one.node: one for one in shown.plan.recomposed}
    if (cast := _casts(shown.plan).get(what)) is not None:
        yield _of_cast(cast)
    for node in explained_nodes(shown.plan, what):
        yield "\n".join(_lines(node, reasons.of(node), recomposed.get(node.name), shown))


def explained_nodes(plan: Plan, what: str) -> tuple[PlannedNode, ...]:
    """Return the nodes that ``explain`` tells of: those that ``what`` names, or the readers of the cast that it names.

    Raises:
        KeyError: nothing in the plan has this name; the message suggests the nearest.
    """
    if (cast := _casts(plan).get(what)) is not None:
        return tuple(node for node in plan.nodes if node.name in cast.readers)
    return select(plan, what, _casts(plan))


def _casts(plan: Plan) -> dict[str, PlannedCast | PlannedCopy]:
    return {one.name: one for one in (*plan.casts, *plan.copies)}


def _of_cast(cast: PlannedCast | PlannedCopy) -> str:
    if isinstance(cast, PlannedCopy):
        what, clips = f"reads the {cast.dtype} copy of {cast.parameter}", ""
    else:
        what = f"casts {cast.value} to {cast.dtype}"
        clips = " Values beyond float16's range are clipped to it." if cast.saturates else ""
    return f"{cast.name} {what}, as its readers run so: {', '.join(cast.readers)}.{clips}"


def _lines(node: PlannedNode, reason: Reason, recomposed: Recomposed | None, shown: View) -> Iterator[str]:
    yield f"{node.name} ({node.op}) in module {node.module or '(root)'} {reason.runs}."
    if recomposed is not None:
        yield f"  recomposed: {recomposed.pattern}, of {', '.join(recomposed.replaced)}; not so with recompose=False."
    if reason.decided:
        yield f"  decided: {reason.decided}."
    for clause in reason.placed:
        yield f"  placed: {clause}."
    yield from (f"  {clause}." for clause in float8_clauses(node, shown.plan.quantized))
    if said := " ".join(shown.predicted.sentences(node)):
        yield f"  error: {said}"
    if reason.change:
        yield f"  to change it: {reason.change}."
    yield from (f"  for backward: {one}." for one in shown.plan.saved if one.name == node.name)
