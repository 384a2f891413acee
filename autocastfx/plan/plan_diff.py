"""Compare two plans of a model, for example before and after an edit of an op list."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush

from autocastfx.errors import ArgumentTypeError
from autocastfx.graph.cell import aligned, table
from autocastfx.plan.plan import Plan, PlannedNode, Precision, Traffic

_MOST_IN_A_CELL = 20  # rows


@dataclass(frozen=True)
class Difference:
    """A node that two plans decide or place differently."""

    before: PlannedNode
    after: PlannedNode

    @property
    def name(self) -> str:
        """The node's name in the later plan."""
        return self.after.name

    @property
    def moved(self) -> bool:
        """True if the node or one of its products runs, or its output is stored, in another precision."""
        before, after = self.before.placement, self.after.placement
        return (before.run, before.store) != (after.run, after.store) or _float8(self.before) != _float8(self.after)


@dataclass(frozen=True, repr=False)
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
        places = {node.name: place for place, node in enumerate(self.after.nodes)}
        pairs = sorted((Difference(*pair) for pair in self._pairs), key=lambda pair: places[pair.name])
        pairs = [pair for pair in pairs if self._renamed(pair) != replace(pair.after, error=None)]
        return tuple(sorted(pairs, key=lambda pair: not pair.moved))

    @cached_property
    def removed(self) -> tuple[PlannedNode, ...]:
        """Nodes of only the earlier plan."""
        return tuple(node for node in self.before.nodes if node.name not in self._names)

    @cached_property
    def added(self) -> tuple[PlannedNode, ...]:
        """Nodes of only the later plan."""
        known = set(self._names.values())
        return tuple(node for node in self.after.nodes if node.name not in known)

    @cached_property
    def _pairs(self) -> tuple[tuple[PlannedNode, PlannedNode], ...]:
        return tuple(_matched(self.before, self.after))

    @cached_property
    def _names(self) -> dict[str, str]:
        """The names in the later plan of nodes that both have, by those in the earlier one."""
        return {old.name: new.name for old, new in self._pairs}

    def _renamed(self, pair: Difference) -> PlannedNode:
        """The earlier node as the later plan would name it, and without its predicted error.

        The error changes with the placement of others.
        """
        old, new, names = pair.before, pair.after, self._names
        cause, reason = old.placement.because, old.decision.reason
        if reason != new.decision.reason:  # some reasons name nodes
            reason = re.sub(r"[\w/]+", lambda word: names.get(word[0], word[0]), reason)
        because = replace(cause, nodes=tuple(names.get(node, node) for node in cause.nodes))
        return replace(
            old,
            name=new.name,
            module=new.module,
            decision=replace(old.decision, reason=reason),
            placement=replace(old.placement, because=because),
            error=None,
        )

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed or self.added)

    def __repr__(self) -> str:
        return f"PlanDiff({'; '.join(self.summary)})"

    def __str__(self) -> str:
        return "\n".join([*self.summary, *aligned(self._rows())])

    def _repr_html_(self) -> str:
        return table(self.summary, self._rows(), most=_MOST_IN_A_CELL, below="print() shows all")

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
            f"casts: {len(before.casts)} → {len(after.casts)}; {self._bytes}{self._predicted}",
        ]

    @property
    def _bytes(self) -> str:
        plans = self.before, self.after
        if any(plan.traffic == Traffic() for plan in plans):  # placement: follow counts those of casts alone
            before, after = (sum(cast.bytes for cast in plan.casts) for plan in plans)
            return f"bytes moved by casts: {before:,} → {after:,}"
        return f"bytes moved: {self.before.traffic.moved:,} → {self.after.traffic.moved:,}"

    @property
    def _predicted(self) -> str:
        before, after = self.before.error, self.after.error
        return "" if before is None or after is None else f"; predicted error: {before:.1e} → {after:.1e}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(d.name, d.after.op, *_cells(self._renamed(d), d.after)) for d in self.changed]
        rows += [(n.name, n.op, "removed", _reason(n)) for n in self.removed]
        rows += [(n.name, n.op, f"added, {_precision(n)}", _reason(n)) for n in self.added]
        return [("node", "op", "runs", "reason"), *rows] if rows else []


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans; nodes are matched by module, op and order, whatever their names.

    An op that was put into the model is added, and those after it are what they were, with other numbers in their names
    and modules. What could be either of several ops is that which is decided as before.

    ::

        print(autocastfx.diff(old.plan, autocastfx.convert(model, inputs, op_list=["default", "mine.yaml"]).plan))

    Raises:
        TypeError: one of them is no plan.
    """
    for given in (before, after):
        if not isinstance(given, Plan):
            raise ArgumentTypeError(f"diff compares plans, as amp_model.plan, not {type(given).__name__}")
    return PlanDiff(before, after)


def _matched(before: Plan, after: Plan) -> Iterator[tuple[PlannedNode, PlannedNode]]:
    """The nodes that both plans have: modules that hold the same ops first, then what is alike but for numbers."""
    old, new = _grouped(before.nodes, _home), _grouped(after.nodes, _home)
    same = {home for home in old.keys() & new.keys() if [n.op for n in old[home]] == [n.op for n in new[home]]}
    for home in same:
        yield from zip(old[home], new[home], strict=True)
    rest, others = (
        _grouped([node for node in plan.nodes if _home(node) not in same], lambda n: re.sub(r"\d+", "#", _home(n)))
        for plan in (before, after)
    )
    for like in rest.keys() & others.keys():
        yield from _in_order(rest[like], others[like])


def _float8(node: PlannedNode) -> object:
    """Which products of a node run in float8, and how, whatever the reason; None if none does."""
    float8 = node.float8
    return (float8.recipe, float8.products, float8.emulate) if float8 is not None and float8.products else None


def _home(node: PlannedNode) -> str:
    """The sub-graph and the module that a node is in."""
    return f"{node.name.rpartition('/')[0]}/{node.module}"


def _grouped(nodes: Sequence[PlannedNode], key: Callable[[PlannedNode], str]) -> dict[str, list[PlannedNode]]:
    groups: dict[str, list[PlannedNode]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return groups


def _in_order(before: Sequence[PlannedNode], after: Sequence[PlannedNode]) -> list[tuple[PlannedNode, PlannedNode]]:
    """Pair nodes of one op in the order of both: as many as can be, and of such ways one with the fewest differences.

    The shortest path from the start of both to their ends. Greedy ways, as difflib's, lose their place in repetitions.
    """
    ops = {n.op for n in before} & {n.op for n in after}
    before, after = ([n for n in nodes if n.op in ops] for nodes in (before, after))
    start, end = (0, 0), (len(before), len(after))
    came: dict[tuple[int, int], tuple[int, int]] = {}
    ways = [(abs(end[0] - end[1]), 0, 0, start, start)]  # the fewest nodes left out in all, differences so far
    while end not in came:
        fewest, unlike, _, place, previous = heappop(ways)
        if place in came:
            continue
        came[place] = previous
        i, j = place
        left_out = fewest - abs((end[0] - i) - (end[1] - j))
        steps = [((i + 1, j), 1, 0)] if i < end[0] else []
        steps += [((i, j + 1), 1, 0)] if j < end[1] else []
        if i < end[0] and j < end[1] and before[i].op == after[j].op:
            steps.append(((i + 1, j + 1), 0, _unlike(before[i], after[j])))
        for (to, at), out, differ in steps:
            bound = left_out + out + abs((end[0] - to) - (end[1] - at))
            heappush(ways, (bound, unlike + differ, -(to + at), (to, at), place))
    pairs: list[tuple[PlannedNode, PlannedNode]] = []
    while end != start:
        i, j = came[end]
        if (i + 1, j + 1) == end:
            pairs.append((before[i], after[j]))
        end = i, j
    return pairs


def _unlike(old: PlannedNode, new: PlannedNode) -> int:
    was, now = old.placement, new.placement
    decided = (old.decision.category, was.run, was.store, was.because.why)
    return (_home(old) != _home(new)) + (decided != (new.decision.category, now.run, now.store, now.because.why))


def _cells(old: PlannedNode, new: PlannedNode) -> tuple[str, str]:
    ran, runs = _precision(old), _precision(new)
    was, now = _reason(old), _reason(new)
    return f"{ran} → {runs}" if ran != runs else runs, f"{now}, before: {was}" if was != now else now


def _precision(node: PlannedNode) -> str:
    if node.placement.run is Precision.CAPTURED:
        return node.dtype or "captured"
    return str(node.placement) + (f", float8 {node.float8}" if node.products else "")


def _reason(node: PlannedNode) -> str:
    placed, decision = node.placement.because, node.decision
    why = f"{decision.category}: {decision.reason or 'no reason given'} ({decision.source})"
    why += f"; {node.float8}" if node.float8 is not None and not node.products else ""
    return why if str(placed) == str(decision.category) else f"{placed}; {why}"
