"""Divide a graph into segments that can be run again one at a time, so that not all values are held at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from autocastfx.graph.alias import moves
from autocastfx.graph.node import elements, tensors, value

__all__ = ["Segment", "segments_of", "whole"]

_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MORE = 1.1  # of the least memory, for fewer segments: each runs several times
_PLACES = 200  # looked at, where the least passes
# Float32 values held for each value inside of a segment: itself, its gradient, both saved again for the second
# backward pass, and what 16 bits change of both.
_INSIDE = 5


@dataclass(frozen=True)
class Segment:
    """Nodes that run one after the other.

    Attributes:
        nodes: without inputs and attributes of the graph.
        reads: nodes outside that they read, in order.
        gives: those among ``nodes`` that later ones read.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def segments_of(graph: fx.Graph, shared: Mapping[fx.Node, Any], held: float) -> tuple[Segment, ...]:
    """Divide ``graph`` where few bytes pass, into as many segments as need the least memory, or little more.

    A storage that is written into is not divided. Of several segments, the last is the output alone, where it reads
    single tensors.

    Args:
        graph: flat.
        shared: its values that share a storage that is written into.
        held: the number of float32 tensors kept for each value that passes from a segment to another.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    if any(isinstance(node.target, HigherOrderOperator) for node in nodes):
        return whole(graph)  # which may write into anything
    places = _Places.of(nodes, shared)
    total = places.inside(0, len(nodes))
    found = [places.cuts(total / parts) for parts in _PARTS]
    least = min(places.memory(cuts, held) for cuts in found)
    best = next(cuts for cuts in found if places.memory(cuts, held) <= _MORE * least)
    if not best:
        return whole(graph)
    parts = [nodes[a:b] for a, b in itertools.pairwise((0, *best, len(nodes)))]
    output = graph.output_node()
    if all(map(_passes, output.all_input_nodes)):
        parts.append([output])
    else:
        parts[-1].append(output)
    return tuple(map(_segment, parts))


def whole(graph: fx.Graph) -> tuple[Segment, ...]:
    """Return the graph as one segment."""
    return (_segment([node for node in graph.nodes if node.op.startswith("call_") or node.op == "output"]),)


def _segment(nodes: Sequence[fx.Node]) -> Segment:
    inside = set(nodes)
    reads = dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside)
    gives = (node for node in nodes if any(user not in inside for user in node.users))
    return Segment(tuple(nodes), tuple(reads), tuple(gives))


@dataclass(frozen=True)
class _Places:
    """Where a graph may be cut. A cut at ``i`` is before node ``i``.

    Attributes:
        sizes: elements of all nodes before each node.
        last: by node, the last that reads it.
        passing: by cut, the elements that pass it; infinite where it may not be.
        own: by node, the elements of its value.
    """

    sizes: Sequence[int]
    last: Sequence[int]
    passing: Sequence[float]
    own: Sequence[int]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], shared: Mapping[fx.Node, Any]) -> _Places:
        at = {node: i for i, node in enumerate(nodes)}
        last = [max((at.get(user, len(nodes)) for user in node.users), default=i) for i, node in enumerate(nodes)]
        own = [elements(node) for node in nodes]
        changes: list[float] = [0.0] * (len(nodes) + 2)
        barred = [0] * (len(nodes) + 2)
        for i, node in enumerate(nodes):
            changes[i + 1] += own[i]
            changes[last[i] + 1] -= own[i]
            if node in shared or not _passes(node):
                barred[i + 1] += 1
                barred[last[i] + 1] -= 1
        passing = list(itertools.accumulate(changes))
        closed = list(itertools.accumulate(barred))
        passing = [math.inf if shut else size for size, shut in zip(passing, closed, strict=True)]
        made = (size if moves(node) else 0 for node, size in zip(nodes, own, strict=True))
        return cls(list(itertools.accumulate(made, initial=0)), last, passing, own)

    def inside(self, start: int, end: int) -> int:
        return self.sizes[end] - self.sizes[start]

    def cuts(self, most: float) -> tuple[int, ...]:
        """Choose cuts that the least passes, with at most ``most`` elements between two where that can be."""
        near = [i for i in range(1, len(self.last)) if self.passing[i] <= min(self.passing[i - 1 : i + 2])]
        near = sorted(sorted((i for i in near if self.passing[i] < math.inf), key=self.passing.__getitem__)[:_PLACES])
        ends, best = [0, *near, len(self.last)], [(0.0, 0.0, 0)]
        for k in range(1, len(ends)):
            passed = self.passing[ends[k]] if k < len(ends) - 1 else 0.0
            least = (math.inf, math.inf, 0)
            for j in reversed(range(k)):
                # The excess first: a part that cannot be divided may be larger than the others.
                excess = max(0.0, self.inside(ends[j], ends[k]) - most)
                if excess > least[0]:
                    break  # and from farther back still more
                least = min(least, (best[j][0] + excess, best[j][1] + passed, j))
            best.append(least)
        found, k = list[int](), len(ends) - 1
        while k := best[k][2]:
            found.append(ends[k])
        return tuple(reversed(found))

    def memory(self, cuts: Sequence[int], held: float) -> float:
        """Estimate the most elements held at a time."""
        bounds = list(itertools.pairwise((0, *cuts, len(self.last))))
        largest = max((self.inside(a, b) for a, b in bounds), default=0)
        passing = sum(self.own[i] for a, b in bounds for i in range(a, b) if self.last[i] >= b < len(self.last))
        return _INSIDE * largest + held * passing


def _passes(node: fx.Node) -> bool:
    """True if the node gives a single tensor or number."""
    return isinstance(value(node), (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)) and len(tensors(node)) <= 1
