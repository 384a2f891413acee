"""Write the header lines of every rendering."""

from __future__ import annotations

from collections import Counter

from autocastfx.plan.plan import Plan, Precision, Traffic, Why
from autocastfx.report.view import View

__all__ = ["summary"]


def summary(view: View) -> list[str]:
    """Return lines with dtype, device, op list, model and variant, and counts of nodes, casts and some ops."""
    plan = view.plan
    run = [row.precision for row in view.rows if row.kind == "op"]
    low, wide, captured = (run.count(p) for p in (Precision.LOW, Precision.FLOAT32, Precision.CAPTURED))
    given = f", {run.count(Precision.GIVEN)} as given" if Precision.GIVEN in run else ""
    casts = [row.cast for row in view.rows if row.cast is not None]
    to_float32, saturating = sum(c.dtype == "float32" for c in casts), sum(c.saturates for c in casts)
    unlisted = ", ".join(f"{op} ({count})" for op, count in sorted(plan.unlisted.items())) or "none"
    draft = "unverified: made without inputs, and replaced at the first call, from that call's inputs"
    counts = sorted(Counter(r.pattern for r in plan.recomposed).items())
    recomposed = [f"recomposed: {', '.join(f'{name} ({count})' for name, count in counts)}"] if counts else []
    return [
        f"autocastfx: {plan.low} on {plan.device}, op list {plan.op_list}",
        *([f"model: {view.model}"] if view.model else []),
        *([draft] if plan.unverified else []),
        f"variant: {view.variant}",
        f"nodes: {low} low ({plan.low}), {wide} float32{given}, {captured} captured ({_captured(plan)})",
        f"casts: {len(casts)}, of which {len(casts) - to_float32} to {plan.low} and {to_float32} to float32; "
        f"{saturating} saturating",
        *([_copies(plan)] if plan.copies else []),
        _moved(plan),
        *([f"predicted error of the {view.predicted.of}: {plan.error_in_words}"] if plan.error is not None else []),
        f"unlisted ops: {unlisted}",
        *recomposed,
        *view.outside,
    ]


def _captured(plan: Plan) -> str:
    is_low_already = any(node.placement.because.why is Why.AS_CAPTURED for node in plan.nodes)
    return f"no {plan.low} value, or the model's own cast" if is_low_already else "no float32 value"


def _copies(plan: Plan) -> str:
    count = len({copy.parameter for copy in plan.copies})
    return f"working copies: of {count} parameters, made anew when a parameter has changed, not in each call"


def _moved(plan: Plan) -> str:
    by_casts = sum(cast.bytes for cast in plan.casts)
    if plan.traffic == Traffic():  # placement: follow compares no costs
        return f"bytes moved by casts: {by_casts:,}"
    moved, simply = plan.traffic.moved, plan.traffic.moved_simply
    return f"bytes moved: {moved:,}, of which by casts {by_casts:,}; by TensorFlow's rule {simply:,}"
