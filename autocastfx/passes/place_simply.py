"""decisions → placements by TensorFlow's rule (auto_mixed_precision): grow the deny set forwards, then the allow set
between allows, then through clear ops. Pure: no edge is touched, no other pass is known.

What the cut is compared with, and what a list gets that says ``placement: simple``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autocastfx.graph.node import has_float32, producer, tensors, uses
from autocastfx.passes.analysis.units import Unit, Units, reach
from autocastfx.plan.plan import Decision, Placement
from autocastfx.policy.rule import Category

__all__ = ["place_simply"]


def place_simply(decisions: Mapping[fx.Node, Decision], units: Units) -> dict[fx.Node, Placement]:
    """A placement for each computing node.

    Args:
        decisions: one for every ``call_*`` node.
        units: of the same graph and decisions.
    """
    tainted = {unit: f"after {name}" for unit, name in units.updates.items()}
    while True:
        _taint(units, tainted)
        low = _grow(units, tainted)
        promote = [u for u in low if u.category is Category.PROMOTE]
        widest = {u: "an input is float32" for u in promote if not _all_low(u, units, low)}
        if not widest:
            break
        tainted.update(widest)
    for unit in units:
        reads = [u.node for n in unit.nodes for u in uses(n) if has_float32(u.node)]
        if unit.is_free and not any(has_float32(n) for n in unit.nodes) and all(units.stored(r) in low for r in reads):
            low.setdefault(unit, "all its inputs are low")
    return units.placements(decisions, low, {u: _because(u, tainted) for u in units if u not in low})


def _because(unit: Unit, tainted: Mapping[Unit, str]) -> str:
    if unit in tainted and unit.category is not Category.DENY:
        return tainted[unit]
    return "no two allow ops enclose it" if unit.is_free else str(unit.category)


def _taint(units: Units, tainted: dict[Unit, str]) -> None:
    """Add what must be float32 because a deny op comes before it; ``tainted`` holds each unit's reason."""
    starts = [u for u in units if u.category is Category.DENY or u in tainted]
    because = {u: tainted.get(u, f"after {u.name}") for u in starts}
    reached = reach(starts, lambda u: u.after, lambda u: u.is_free, because)
    ends = [u for u in units if u.category in (Category.DENY, Category.INFER, Category.PROMOTE)]
    leads_on = reach(ends, lambda u: u.before, lambda u: u.category is Category.CLEAR, {})
    for unit, reason in reached.items():
        if unit.category in (Category.INFER, Category.PROMOTE) or (
            unit.category is Category.CLEAR and unit in leads_on
        ):
            tainted.setdefault(unit, reason)


def _grow(units: Units, tainted: Mapping[Unit, str]) -> dict[Unit, str]:
    """The units that run low, each with its reason: allow ops, what lies between them, and clear ops next to those."""

    def is_open(unit: Unit) -> bool:
        return unit.is_free and unit not in tainted

    allow = [u for u in units if u.category is Category.ALLOW]
    after = reach(allow, lambda u: u.after, is_open, {u: u.name for u in allow})
    before = reach(allow, lambda u: u.before, is_open, {u: u.name for u in allow})
    low = dict.fromkeys(allow, "allow")
    low.update({u: f"between {after[u]} and {before[u]}" for u in after if u in before and u not in low})
    names = {u: u.name for u in low}
    near = reach(
        list(low), lambda u: [*u.before, *u.after], lambda u: is_open(u) and u.category is Category.CLEAR, names
    )
    low.update({u: f"next to {name}" for u, name in near.items() if u not in low})
    return low


def _all_low(unit: Unit, units: Units, low: Mapping[Unit, str]) -> bool:
    """Whether every floating input is low already; a 0-d tensor never widens a result."""
    for node in unit.nodes:
        for read in (u.node for u in uses(node) if has_float32(u.node)):
            source = units.of.get(producer(read))
            if source is unit or (source is not None and source in low):
                continue
            if any(t.ndim for t in tensors(read)):
                return False
    return True
