"""Compare two plans of a model, for example before and after an edit of an op list."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from autocastfx.plan.plan import Plan, PlannedNode, Precision

__all__ = ["Difference", "PlanDiff", "diff"]


@dataclass(frozen=True)
class Difference:
    """A node that two plans decide or place differently."""

    before: PlannedNode
    after: PlannedNode

    @property
    def name(self) -> str:
        """The node's name."""
        return self.after.name

    @property
    def moved(self) -> bool:
        """True if the node runs, or its output is stored, in another precision."""
        before, after = self.before.placement, self.after.placement
        return (before.run, before.store) != (after.run, after.store)


@dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans. False in a condition if all nodes are equal.

    ``str`` gives a table: first the nodes that moved, then nodes where only the reason differs, then nodes that one
    plan lacks.
    """

    before: Plan
    after: Plan

    @cached_property
    def changed(self) -> tuple[Difference, ...]:
        """Nodes that differ, in the order of the later plan, but those that moved first."""
        known = {node.name: node for node in self.before.nodes}
        both = (Difference(known[n.name], n) for n in self.after.nodes if n.name in known)
        pairs = (pair for pair in both if _decided(pair.before) != _decided(pair.after))
        return tuple(sorted(pairs, key=lambda pair: not pair.moved))

    @cached_property
    def removed(self) -> tuple[PlannedNode, ...]:
        """Nodes of only the earlier plan."""
        known = {node.name for node in self.after.nodes}
        return tuple(node for node in self.before.nodes if node.name not in known)

    @cached_property
    def added(self) -> tuple[PlannedNode, ...]:
        """Nodes of only the later plan."""
        known = {node.name for node in self.before.nodes}
        return tuple(node for node in self.after.nodes if node.name not in known)

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed or self.added)

    def __str__(self) -> str:
        return "\n".join([*self.summary, *_aligned(self._rows())])

    @property
    def summary(self) -> list[str]:
        """The lines above the table: both plans, and how many nodes, casts and bytes differ."""
        moves = Counter((_precision(d.before), _precision(d.after)) for d in self.changed if d.moved)
        moved = [f"{count} from {old} to {new}" for (old, new), count in sorted(moves.items())]
        before, after = self.before, self.after
        same_reason = sum(not d.moved for d in self.changed)
        return [
            f"plans: {before.low} on {before.device}, op list {before.op_list} → "
            f"{after.low} on {after.device}, op list {after.op_list}",
            f"nodes moved: {', '.join(moved) or 'none'}; with another reason alone: {same_reason}; "
            f"removed: {len(self.removed)}; added: {len(self.added)}",
            f"casts: {len(before.casts)} → {len(after.casts)}; "
            f"bytes moved: {before.traffic.moved:,} → {after.traffic.moved:,}{self._predicted}",
        ]

    @property
    def _predicted(self) -> str:
        before, after = self.before.error, self.after.error
        return "" if before is None or after is None else f"; predicted error: {before:.1e} → {after:.1e}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(d.name, d.after.op, *_cells(d)) for d in self.changed]
        rows += [(n.name, n.op, "removed", _reason(n)) for n in self.removed]
        rows += [(n.name, n.op, f"added, {_precision(n)}", _reason(n)) for n in self.added]
        return [("node", "op", "runs", "reason"), *rows] if rows else []


def _decided(node: PlannedNode) -> PlannedNode:
    """The node without its predicted error, which changes with the placement of others."""
    return replace(node, error=None)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans; nodes are matched by name.

    ::

        print(autocastfx.diff(old.plan, autocastfx.convert(model, inputs, op_list=["default", "mine.yaml"]).plan))
    """
    return PlanDiff(before, after)


def _cells(pair: Difference) -> tuple[str, str]:
    old, new = _precision(pair.before), _precision(pair.after)
    runs = f"{old} → {new}" if old != new else new
    was, now = _reason(pair.before), _reason(pair.after)
    return runs, f"{now}, before: {was}" if was != now else now


def _precision(node: PlannedNode) -> str:
    run, store = node.placement.run, node.placement.store
    if run is Precision.CAPTURED:
        return node.dtype or "captured"
    return str(run) if run is store else f"{run}, stored {store}"


def _reason(node: PlannedNode) -> str:
    placed, decision = node.placement.because, node.decision
    why = f"{decision.category}: {decision.reason or 'no reason given'} ({decision.source})"
    return why if str(placed) == str(decision.category) else f"{placed}; {why}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return ["  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
