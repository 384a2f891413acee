"""Write what a converted model is, in two lines."""

from __future__ import annotations

from collections import Counter

from autocastfx.plan.plan import Precision
from autocastfx.runtime.variant_table import Modes, VariantTable

__all__ = ["model_text"]


def model_text(table: VariantTable, modes: Modes) -> str:
    """Return class, dtype, device and the counts of the variant that is shown in ``modes``; what holds without one."""
    name, variant = f"AmpModule of {table.maker.class_name}", table.active(modes)
    if variant is None:
        return f"{name}, captured at its first call"
    plan, runs = variant.plan, Counter(node.placement.run for node in variant.plan.nodes)
    counts = ", ".join(f"{runs[p]} {p}" for p in Precision if runs[p])
    kind = "draft until the first call" if plan.unverified else f"{variant.mode} mode"
    return (
        f"{name}: {plan.low} on {plan.device}, op list {plan.op_list}\n"
        f"  {kind}, 1 of {len(table.shown)} variants: {counts}; {len(plan.casts)} casts"
    )
