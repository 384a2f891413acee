"""decisions → the precision of every port. Pure: no edge is touched, no other pass is known.

The rule is TensorFlow's (auto_mixed_precision: grow the deny set forwards, then the allow set between allows, then
through clear ops), on units instead of nodes: the views and writers of one mutated storage are decided as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autocastfx.alias import AliasSet, alias_sets
from autocastfx.graph import has_float32, is_member, producer, tensors, uses
from autocastfx.op_list import Category
from autocastfx.plan import Decision, Placement, Precision
from autocastfx.ports import Ports

__all__ = ["place"]

_FREE = (Category.INFER, Category.CLEAR, Category.PROMOTE)
# The category of a unit is the first of these that any of its members has.
_STRENGTH = (Category.KEEP, Category.DENY, Category.ALLOW, Category.PROMOTE, Category.INFER, Category.CLEAR)


@dataclass(eq=False)
class _Unit:
    """Nodes that take one precision: a single node, or all views and writers of one mutated storage."""

    nodes: list[fx.Node]
    category: Category
    before: list[_Unit] = field(default_factory=list)
    after: list[_Unit] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.nodes[0].name


def place(graph: fx.Graph, decisions: Mapping[fx.Node, Decision], ports: Ports) -> dict[fx.Node, Placement]:
    """A placement for each computing node of ``graph``.

    Args:
        graph: captured, with abstract values.
        decisions: one for every ``call_*`` node.
        ports: which inputs of a node share its precision.
    """
    storages = alias_sets(graph, ports.written)
    units = _units(graph, decisions, storages)
    tainted = _state_updates(units, storages)
    while True:
        _taint(dict.fromkeys(units.values()), tainted)
        low = _grow(dict.fromkeys(units.values()), tainted)
        widest = {
            u: "an input is float32" for u in low if u.category is Category.PROMOTE and not _all_low(u, units, low)
        }
        if not widest:
            break
        tainted.update(widest)
    placements: dict[fx.Node, Placement] = {}
    for node in decisions:
        placements[node] = _placement(node, decisions[node], placements, units, low, tainted)
        if node in storages and not is_member(node):
            placements[node] = _stored(node, placements[node], storages[node], units, low)
    for node in (n for n in decisions if is_member(n)):
        captured = Placement(Precision.CAPTURED, Precision.CAPTURED, "no float32 value")
        placements[node] = placements[producer(node)] if has_float32(node) else captured
    return placements


def _units(
    graph: fx.Graph, decisions: Mapping[fx.Node, Decision], storages: Mapping[fx.Node, AliasSet]
) -> dict[fx.Node, _Unit]:
    units: dict[fx.Node, _Unit] = {}
    for node in (n for n in decisions if not is_member(n) and n not in units):
        storage = storages.get(node)
        if storage is None or _computes_apart(node, storage, decisions):
            unit = _Unit([node], decisions[node].category)
        else:
            tied = [n for n in graph.nodes if n in storage.members and n in decisions and not is_member(n)]
            tied = [n for n in tied if not _computes_apart(n, storage, decisions)]
            categories = {decisions[n].category for n in tied}
            stays = decisions.get(storage.root) is None or decisions[storage.root].category in _FIXED
            unit = _Unit(tied, Category.DENY if stays else next(c for c in _STRENGTH if c in categories))
        units.update(dict.fromkeys(unit.nodes, unit))
    for node, unit in units.items():
        for use in uses(node):
            source = units.get(producer(use.node))
            if source is not None and source is not unit and has_float32(use.node):
                unit.before.append(source)
                source.after.append(unit)
    return units


# A storage made by one of these, or by no op at all (a graph input, a parameter, a buffer), stays as it was captured.
_FIXED = (Category.DENY, Category.KEEP)


def _computes_apart(node: fx.Node, storage: AliasSet, decisions: Mapping[fx.Node, Decision]) -> bool:
    """Whether ``node`` makes the storage and may run in another precision than it is stored in."""
    return node is storage.root and decisions[node].category not in _FREE


def _state_updates(units: Mapping[fx.Node, _Unit], storages: Mapping[fx.Node, AliasSet]) -> dict[_Unit, str]:
    """What computes the next contents of a parameter, buffer or input from its present ones.

    An average that is kept in float32 but computed in 16 bits stands still, for its steps are too small.
    """
    found: dict[_Unit, str] = {}
    for storage in dict.fromkeys(storages.values()):
        if storage.root in units:
            continue
        readers = [units[user] for member in storage.members for user in member.users if user in units]
        writers = [units[node] for node in storage.members if node in units]
        after = _reach(readers, lambda u: u.after, lambda u: u.category in _FREE, {})
        before = _reach(writers, lambda u: u.before, lambda u: u.category in _FREE, {})
        found.update({u: storage.root.name for u in after if u in before and u.category in _FREE})
    return found


def _taint(units: Iterable[_Unit], tainted: dict[_Unit, str]) -> None:
    """Add what must be float32 because a deny op comes before it; ``tainted`` holds each unit's reason."""
    units = list(units)
    starts = [u for u in units if u.category is Category.DENY or u in tainted]
    because = {u: tainted.get(u, u.name) for u in starts}
    reached = _reach(starts, lambda u: u.after, lambda u: u.category in _FREE, because)
    ends = [u for u in units if u.category in (Category.DENY, Category.INFER, Category.PROMOTE)]
    leads_on = _reach(ends, lambda u: u.before, lambda u: u.category is Category.CLEAR, {})
    for unit, origin in reached.items():
        if unit.category in (Category.INFER, Category.PROMOTE) or (
            unit.category is Category.CLEAR and unit in leads_on
        ):
            tainted.setdefault(unit, origin)


def _grow(units: Iterable[_Unit], tainted: Mapping[_Unit, str]) -> dict[_Unit, str]:
    """The units that run low, each with its reason: allow ops, what lies between them, and clear ops next to those."""
    units = list(units)

    def is_open(unit: _Unit) -> bool:
        return unit.category in _FREE and unit not in tainted

    allow = [u for u in units if u.category is Category.ALLOW]
    after = _reach(allow, lambda u: u.after, is_open, {u: u.name for u in allow})
    before = _reach(allow, lambda u: u.before, is_open, {u: u.name for u in allow})
    low = dict.fromkeys(allow, "allow")
    low.update({u: f"between {after[u]} and {before[u]}" for u in after if u in before and u not in low})
    names = {u: u.name for u in low}
    near = _reach(
        list(low), lambda u: [*u.before, *u.after], lambda u: is_open(u) and u.category is Category.CLEAR, names
    )
    low.update({u: f"next to {name}" for u, name in near.items() if u not in low})
    return low


def _reach(
    starts: Iterable[_Unit],
    neighbours: Callable[[_Unit], Iterable[_Unit]],
    passes: Callable[[_Unit], bool],
    labels: Mapping[_Unit, str],
) -> dict[_Unit, str]:
    """All units that ``starts`` reach through units that pass, each with the label of the first start to reach it."""
    found = {u: labels.get(u, "") for u in starts}
    queue = deque(found)
    while queue:
        unit = queue.popleft()
        for other in neighbours(unit):
            if other not in found and passes(other):
                found[other] = found[unit]
                queue.append(other)
    return found


def _all_low(unit: _Unit, units: Mapping[fx.Node, _Unit], low: Mapping[_Unit, str]) -> bool:
    """Whether every floating input is low already; a 0-d tensor never widens a result."""
    for node in unit.nodes:
        for read in (u.node for u in uses(node) if has_float32(u.node)):
            source = units.get(producer(read))
            if source is unit or (source is not None and source in low):
                continue
            if any(t.ndim for t in tensors(read)):
                return False
    return True


def _placement(
    node: fx.Node,
    decision: Decision,
    placed: Mapping[fx.Node, Placement],
    units: Mapping[fx.Node, _Unit],
    low: Mapping[_Unit, str],
    tainted: Mapping[_Unit, str],
) -> Placement:
    if is_member(node):
        return Placement(Precision.CAPTURED, Precision.CAPTURED, "")  # follows its tuple, below
    reads = [u.node for u in uses(node) if has_float32(u.node)]
    if not reads and not has_float32(node):
        return Placement(Precision.CAPTURED, Precision.CAPTURED, decision.reason)
    unit = units[node]
    if unit in low:
        return Placement(Precision.LOW, Precision.LOW, low[unit])
    if not has_float32(node) and decision.category in _FREE:
        stored = [placed.get(producer(read)) for read in reads]
        if all(p is not None and p.store is Precision.LOW for p in stored):
            return Placement(Precision.LOW, Precision.LOW, "all its inputs are low")
    if unit in tainted and unit.category is not Category.DENY:
        cause = tainted[unit]
        because = cause if cause.startswith("an input") else f"after {cause}"
    elif unit.category is Category.DENY and decision.category is not Category.DENY:
        because = "shares storage that stays float32"
    else:
        because = str(decision.category) if decision.category not in _FREE else "no two allow ops enclose it"
    return Placement(Precision.FLOAT32, Precision.FLOAT32, because)


def _stored(
    node: fx.Node, placement: Placement, storage: AliasSet, units: Mapping[fx.Node, _Unit], low: Mapping[_Unit, str]
) -> Placement:
    """The same placement, stored as the other members of the node's storage are."""
    others = [units[n] for n in storage.members if n in units and units[n] is not units[node]]
    if node is not storage.root or not others:
        return placement
    store = Precision.LOW if others[0] in low else Precision.FLOAT32
    return Placement(placement.run, store, placement.because)
