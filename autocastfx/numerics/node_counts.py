"""Counts of the values of chosen nodes of a converted model: kept on their device until they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.graph.alias import moves
from autocastfx.graph.node import is_cast, is_member
from autocastfx.numerics.paired_run import floating
from autocastfx.numerics.value_counts import DeviceCounts, ValueCounts, count_values, read_counts
from autocastfx.numerics.watched_node import WatchedNode
from autocastfx.plan.plan import Plan, Precision
from autocastfx.policy.yaml_tree import nearest
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["NodeCounts", "check_nodes"]

_LOW = {dtype_name(dtype) for dtype in LOW_DTYPES}
_CAST = "cast"


@dataclass(frozen=True)
class _Key:
    """A row: the name, op and module of a node."""

    name: str
    op: str
    module: str


@dataclass
class _Tally:
    """The counts of a row so far."""

    dtypes: dict[str, None] = field(default_factory=dict[str, None])
    counts: ValueCounts = field(default_factory=ValueCounts)
    first_overflow: int | None = None


class NodeCounts:
    """Counts the values of nodes, by step."""

    def __init__(self, amp_model: AmpModule, nodes: Sequence[str] | None) -> None:
        """Count nothing yet.

        Args:
            amp_model: whose nodes will be seen.
            nodes: names of nodes or ops. None: nodes that run in 16 bits, without views, and casts to 16 bits.
        """
        self._model = amp_model
        self._nodes = None if nodes is None else frozenset(nodes)
        self._chosen: WeakKeyDictionary[fx.Graph, Mapping[str, _Key]] = WeakKeyDictionary()
        self._pending: list[tuple[int, _Key, str, DeviceCounts]] = []  # the step, the node, its dtype and its counts
        self._tallies: dict[_Key, _Tally] = {}

    def see(self, step: int, node: fx.Node, value: Any, read: Sequence[Any]) -> None:
        """Count the value of a node, if it is one of the chosen. Nothing waits for the device.

        Args:
            step: the number of the step.
            node: of a variant's graph.
            value: what it gave.
            read: the values that it read.
        """
        if node.graph not in self._chosen:
            variant = next(variant for variant in self._model.variants if variant.graph is node.graph)
            self._chosen[node.graph] = self._choose(variant.plan, node.graph)
        key = self._chosen[node.graph].get(node.name)
        if key is None:
            return
        source = read[-1] if key.op == _CAST else None  # a working copy is made of the last value that it reads
        for tensor in floating(value):
            if (counts := count_values(tensor, source)) is not None:
                self._pending.append((step, key, dtype_name(tensor.dtype), counts))

    def _choose(self, plan: Plan, graph: fx.Graph) -> dict[str, _Key]:
        """The rows of the nodes to count, by name."""
        keys = {node.name: _Key(node.name, node.op, node.module) for node in plan.nodes}
        made = (*plan.casts, *plan.copies)
        keys |= {one.name: _Key(one.name, _CAST, _module_of(one.readers, keys)) for one in made}
        if self._nodes is not None:
            return {name: key for name, key in keys.items() if not self._nodes.isdisjoint((name, key.op))}
        low = {node.name for node in plan.nodes if node.placement.run is Precision.LOW}
        low |= {one.name for one in made if one.dtype in _LOW}
        nodes = [node for node in graph.nodes if node.name in low and not is_member(node)]
        return {node.name: keys[node.name] for node in nodes if is_cast(node) or moves(node)}

    def read(self, before: int | None = None) -> None:
        """Read the counts from their devices.

        Args:
            before: do nothing unless there are counts of steps before this one.
        """
        if before is not None and (not self._pending or self._pending[-1][0] >= before):
            return
        pending, self._pending = self._pending, []
        for (step, key, dtype, _), counts in zip(pending, read_counts([one[3] for one in pending]), strict=True):
            tally = self._tallies.setdefault(key, _Tally())
            tally.dtypes[dtype] = None
            tally.counts = tally.counts + counts
            if counts.overflow and tally.first_overflow is None:
                tally.first_overflow = step

    def note_overflow(self, name: str, step: int) -> None:
        """Note that the node called ``name`` overflowed at ``step``, the latest, though it was not counted there."""
        self.read()
        for tally in (tally for key, tally in self._tallies.items() if key.name == name):
            tally.first_overflow = tally.first_overflow or step

    def join_steps(self) -> None:
        """Take all steps up to now for the first."""
        self.read()
        for tally in self._tallies.values():
            tally.first_overflow = tally.first_overflow and 1

    def rows(self) -> tuple[WatchedNode, ...]:
        """Read the counts, and return those of each node, in graph order."""
        self.read()
        return tuple(
            WatchedNode(
                **vars(key), dtype=",".join(tally.dtypes), **vars(tally.counts), first_overflow=tally.first_overflow
            )
            for key, tally in self._tallies.items()
        )


def _module_of(readers: Sequence[str], keys: Mapping[str, _Key]) -> str:
    """The module of the first reader of a cast; empty if the model's output is the only one."""
    return next((keys[name].module for name in readers if name in keys), "")


def check_nodes(nodes: Sequence[str], plans: Sequence[Plan]) -> None:
    """Check that each of ``nodes`` is the name of a node or an op in one of the plans, or ``"cast"``.

    Raises:
        ValueError: one is not; the message suggests the nearest.
    """
    known = {_CAST, *(name for plan in plans for node in plan.nodes for name in (node.name, node.op))}
    known |= {one.name for plan in plans for one in (*plan.casts, *plan.copies)}
    for name in nodes:
        if name not in known:
            raise ValueError(
                f"the model has no node and no op called {name!r}{nearest(name, known)}. amp_model.plan.nodes has the "
                "names of nodes and ops."
            )
