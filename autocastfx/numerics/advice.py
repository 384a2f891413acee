"""Advice on a node that 16 bits do not suit: why it runs so, and the op list that changes it."""

from __future__ import annotations

from collections.abc import Sequence

from autocastfx.plan.cause import Why
from autocastfx.plan.plan import PlannedNode, Precision

__all__ = ["because_of", "op_list_for"]


def because_of(entry: PlannedNode | None) -> str:
    """The reason for a node's precision; ``entry`` is None for a node that the conversion made."""
    if entry is None:
        return "the conversion made this node"
    return f"{entry.placement.because}; {entry.decision}"


def op_list_for(entries: Sequence[PlannedNode]) -> str:
    """An op list, in YAML, by which nodes run in float32; empty where one is made by what no list overrides."""
    low = [e for e in entries if e.placement.run is Precision.LOW and e.placement.because.why is not Why.FOLDED]
    if not low or len(low) < sum(e.placement.run is not Precision.FLOAT32 for e in entries):
        return ""
    ops = list(dict.fromkeys(e.op for e in low if not e.module))
    modules: dict[str, dict[str, None]] = {}
    for entry in (e for e in low if e.module):
        modules.setdefault(entry.module, {})[entry.op] = None
    lines = [f"deny: [{', '.join(ops)}]"] if ops else []
    lines += ["modules:"] if modules else []
    lines += [
        f'  - {{path: "{path}", category: float32, ops: [{", ".join(found)}]}}' for path, found in modules.items()
    ]
    return "\n".join(lines) + "\n"
