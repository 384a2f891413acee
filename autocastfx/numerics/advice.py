"""Advice on a node that 16 bits do not suit: why it runs so, and the op list that changes it."""

from __future__ import annotations

from collections.abc import Sequence

from autocastfx.plan.cause import Why
from autocastfx.plan.plan import PlannedNode, Precision
from autocastfx.plan.proposed_list import proposed_list

__all__ = ["because_of", "op_list_for"]


def because_of(entry: PlannedNode | None) -> str:
    """The reason for a node's precision; ``entry`` is None for a node that the conversion made."""
    if entry is None:
        return "the conversion made this node"
    because = entry.placement.because
    if because.why in (Why.ALLOW, Why.DENY, Why.KEEP, Why.PROMOTE):
        return f"its category is {entry.decision}"
    return f"{because.clause}; its category is {entry.decision}"


def op_list_for(entries: Sequence[PlannedNode]) -> str:
    """An op list, in YAML, by which nodes run in float32; empty where one is made by what no list overrides."""
    low = [e for e in entries if e.placement.run is Precision.LOW and e.placement.because.why is not Why.FOLDED]
    if not low or len(low) < sum(e.placement.run is not Precision.FLOAT32 for e in entries):
        return ""
    return proposed_list(low, "float32")
