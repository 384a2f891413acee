"""Nodes that take one precision together: a single node, or all views and writers of one mutated storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from autocastfx.graph.alias import AliasSet, alias_sets
from autocastfx.graph.node import has_float32, is_member, producer, uses
from autocastfx.passes.analysis.ports import Ports
from autocastfx.plan.plan import Cause, Decision, Forced, Placement, Precision, Why
from autocastfx.policy.rule import Category

__all__ = ["FREE", "Unit", "Units", "units_of"]

FREE = (Category.INFER, Category.CLEAR, Category.PROMOTE)
# The category of a unit is the first of these that any of its members has.
_STRENGTH = (Category.KEEP, Category.DENY, Category.ALLOW, Category.PROMOTE, Category.INFER, Category.CLEAR)
# A storage made by one of these, or by no op at all (a graph input, a parameter, a buffer), stays as it was captured.
_FIXED = (Category.DENY, Category.KEEP)


@dataclass(eq=False)
class Unit:
    """Nodes that are placed as one. ``before`` and ``after`` are its neighbours, once for each value between them."""

    nodes: list[fx.Node]
    category: Category
    before: list[Unit] = field(default_factory=list)
    after: list[Unit] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its first node."""
        return self.nodes[0].name

    @property
    def is_free(self) -> bool:
        """True if its category leaves its precision to the placement."""
        return self.category in FREE


@dataclass(frozen=True)
class Units:
    """The units of a graph.

    Attributes:
        of: the unit that a computing node runs in.
        storages: the set of values that share its storage, for each value that is mutated somewhere.
        ports: which inputs of a node share its precision.
    """

    of: Mapping[fx.Node, Unit]
    storages: Mapping[fx.Node, AliasSet]
    ports: Ports

    def __iter__(self) -> Iterator[Unit]:
        return iter(dict.fromkeys(self.of.values()))

    def stored(self, value: fx.Node) -> Unit | None:
        """The unit whose precision the storage of ``value`` has; None for what no unit makes, which is float32."""
        made_by = producer(value)
        if made_by in self.storages and self.storages[made_by].root is made_by:
            others = (self.of[n] for n in self.storages[made_by].members if n in self.of)
            return next((u for u in others if u is not self.of.get(made_by)), self.of.get(made_by))
        return self.of.get(made_by)

    def placements(
        self, decisions: Mapping[fx.Node, Decision], low: Mapping[Unit, Cause], float32: Mapping[Unit, Cause]
    ) -> dict[fx.Node, Placement]:
        """A placement for each computing node, from the units that are low and those that are not, with the reasons."""
        found: dict[fx.Node, Placement] = {}
        for node in decisions:
            if is_member(node):
                continue
            if not has_float32(node) and not any(has_float32(u.node) for u in uses(node)):
                is_border = decisions[node].source is Forced.SUB_GRAPH
                found[node] = _as_captured(Why.CROSSES_BORDER if is_border else Why.NO_FLOAT32)
                continue
            unit, stored = self.of[node], self.stored(node)
            shares = unit.category is Category.DENY and decisions[node].category is not Category.DENY
            because = low.get(unit) or (Cause(Why.SHARES_STORAGE) if shares else float32[unit])
            run, store = (Precision.LOW if u in low else Precision.FLOAT32 for u in (unit, stored))
            found[node] = Placement(run, store, because)
        for node in (n for n in decisions if is_member(n)):
            found[node] = found[producer(node)] if has_float32(node) else _as_captured(Why.NO_FLOAT32)
        as_stored = self.ports.reads_as_stored(decisions, found, self.storages.keys())
        return {n: replace(found[n], as_stored=as_stored[n]) for n in decisions}


def _as_captured(why: Why) -> Placement:
    return Placement(Precision.CAPTURED, Precision.CAPTURED, Cause(why))


def units_of(graph: fx.Graph, decisions: Mapping[fx.Node, Decision], ports: Ports) -> Units:
    """The units of ``graph``, in its order.

    Args:
        graph: captured, with abstract values.
        decisions: one for every ``call_*`` node.
        ports: which inputs of a node share its precision.
    """
    storages = alias_sets(graph, ports.written)
    position = {node: i for i, node in enumerate(graph.nodes)}
    units: dict[fx.Node, Unit] = {}
    for node in (n for n in decisions if not is_member(n) and n not in units):
        storage = storages.get(node)
        if storage is None or _computes_apart(node, storage, decisions):
            unit = Unit([node], decisions[node].category)
        else:
            tied = sorted((n for n in storage.members if n in decisions and not is_member(n)), key=position.__getitem__)
            tied = [n for n in tied if not _computes_apart(n, storage, decisions)]
            categories = {decisions[n].category for n in tied}
            stays = decisions.get(storage.root) is None or decisions[storage.root].category in _FIXED
            unit = Unit(tied, Category.DENY if stays else next(c for c in _STRENGTH if c in categories))
        units.update(dict.fromkeys(unit.nodes, unit))
    for node, unit in units.items():
        for use in uses(node):
            source = units.get(producer(use.node))
            if source is not None and source is not unit and has_float32(use.node):
                unit.before.append(source)
                source.after.append(unit)
    return Units(units, storages, ports)


def _computes_apart(node: fx.Node, storage: AliasSet, decisions: Mapping[fx.Node, Decision]) -> bool:
    """True if ``node`` makes the storage and may run in another precision than it is stored in."""
    return node is storage.root and decisions[node].category not in FREE
