"""``explain``: why a node runs in the precision that it runs in, in words, and what edit would change it."""

from __future__ import annotations

from collections.abc import Iterator

from autocastfx.plan.plan import PlannedNode, Recomposed
from autocastfx.plan.select_nodes import select
from autocastfx.report.dump import view_of
from autocastfx.report.reason import Reason, Reasons
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["explain"]


def explain(amp_model: AmpModule, what: str) -> str:
    """Why the nodes that ``what`` names run in the precision that they run in, and what would change it.

    Args:
        amp_model: what ``convert`` returned. The variant that its ``plan`` shows is explained.
        what: a node, an op, a module, or an op inside a module; paths may be patterns (``layers.*.attn.softmax``).

    Returns:
        A paragraph for each node; nodes that no float32 value touches are only named.

    Raises:
        KeyError: nothing in the plan is called so; with the nearest name.
        TypeError: ``amp_model`` is no converted model, or ``what`` no text.
        VariantError: nothing is captured yet.
    """
    if not isinstance(amp_model, AmpModule):
        raise TypeError(
            f"explain speaks of what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    if not isinstance(what, str):
        raise TypeError(f"what is to be explained is named by a text, such as 'softmax', not {what!r}")
    shown = view_of(amp_model)
    reasons = Reasons(shown.rows)
    recomposed = {one.node: one for one in shown.plan.recomposed}
    found = select(shown.plan, what)
    paragraphs = ("\n".join(_lines(node, reasons.of(node), recomposed.get(node.name))) for node in found)
    return "\n".join(part for paragraph in paragraphs for part in (paragraph, ""))


def _lines(node: PlannedNode, reason: Reason, recomposed: Recomposed | None) -> Iterator[str]:
    yield f"{node.name} ({node.op}) in module {node.module or '(root)'} {reason.runs}."
    if recomposed is not None:
        yield f"  recomposed: {recomposed.pattern}, of {', '.join(recomposed.replaced)}; not so with recompose=False."
    if reason.decided:
        yield f"  decided: {reason.decided}."
    for clause in reason.placed:
        yield f"  placed: {clause}."
    if reason.change:
        yield f"  to change it: {reason.change}."
