"""decisions → placements by TensorFlow's rule (auto_mixed_precision): grow the deny set forwards, then the allow set
between allows, then through clear ops. Pure: no edge is touched, no other pass is known.

What the cut is compared with, and what a list gets that says ``placement: simple``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autocastfx.graph.alias import reachable
from autocastfx.graph.node import has_float32, producer, tensors, uses
from autocastfx.passes.analysis.units import Unit, Units
from autocastfx.plan.plan import Cause, Decision, Placement, Why
from autocastfx.policy.rule import Category

__all__ = ["place_simply"]


def place_simply(decisions: Mapping[fx.Node, Decision], units: Units) -> dict[fx.Node, Placement]:
    """A placement for each computing node.

    Args:
        decisions: one for every ``call_*`` node.
        units: of the same graph and decisions.
    """
    tainted: dict[Unit, Cause] = {}
    while True:
        _taint(units, tainted)
        low = _grow(units, tainted)
        promote = [u for u in low if u.category is Category.PROMOTE]
        widest = {u: Cause(Why.INPUT_IS_FLOAT32) for u in promote if not _all_low(u, units, low)}
        if not widest:
            break
        tainted.update(widest)
    for unit in units:
        reads = [u.node for n in unit.nodes for u in uses(n) if has_float32(u.node)]
        if unit.is_free and not any(has_float32(n) for n in unit.nodes) and all(units.stored(r) in low for r in reads):
            low.setdefault(unit, Cause(Why.ALL_LOW))
    return units.placements(decisions, low, {u: _because(u, tainted) for u in units if u not in low})


def _because(unit: Unit, tainted: Mapping[Unit, Cause]) -> Cause:
    if unit in tainted and unit.category is not Category.DENY:
        return tainted[unit]
    return Cause(Why.NOT_ENCLOSED if unit.is_free else Why(unit.category.value))


def _taint(units: Units, tainted: dict[Unit, Cause]) -> None:
    """Add what must be float32 because a deny op comes before it; ``tainted`` holds each unit's reason."""
    starts = [u for u in units if u.category is Category.DENY or u in tainted]
    because = {u: tainted.get(u, Cause(Why.AFTER, (u.name,))) for u in starts}
    reached = reachable(starts, lambda u: (v for v in u.after if v.is_free))
    ends = [u for u in units if u.category in (Category.DENY, Category.INFER, Category.PROMOTE)]
    leads_on = reachable(ends, lambda u: (v for v in u.before if v.category is Category.CLEAR))
    for unit, start in reached.items():
        if unit.category in (Category.INFER, Category.PROMOTE) or (
            unit.category is Category.CLEAR and unit in leads_on
        ):
            tainted.setdefault(unit, because[start])


def _grow(units: Units, tainted: Mapping[Unit, Cause]) -> dict[Unit, Cause]:
    """The units that run low, each with its reason: allow ops, what lies between them, and clear ops next to those."""

    def is_open(unit: Unit) -> bool:
        return unit.is_free and unit not in tainted

    allow = [u for u in units if u.category is Category.ALLOW]
    after = reachable(allow, lambda u: filter(is_open, u.after))
    before = reachable(allow, lambda u: filter(is_open, u.before))
    low = dict.fromkeys(allow, Cause(Why.ALLOW))
    low.update({u: Cause(Why.BETWEEN, (after[u].name, before[u].name)) for u in after if u in before and u not in low})
    near = reachable(low, lambda u: (v for v in (*u.before, *u.after) if is_open(v) and v.category is Category.CLEAR))
    low.update({u: Cause(Why.NEXT_TO, (start.name,)) for u, start in near.items() if u not in low})
    return low


def _all_low(unit: Unit, units: Units, low: Mapping[Unit, Cause]) -> bool:
    """True if every floating input is low already; a 0-d tensor never widens a result."""
    for node in unit.nodes:
        for read in (u.node for u in uses(node) if has_float32(u.node)):
            source = units.of.get(producer(read))
            if source is unit or (source is not None and source in low):
                continue
            if any(t.ndim for t in tensors(read)):
                return False
    return True
