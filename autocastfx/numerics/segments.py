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

_MORE = 1.1  # times the least memory, for fewer segments: each runs several times
_CLOSE = 1.02  # limits of memory that are not told apart
_PLACES = 200  # looked at, where the least passes
# Float32 values held for each value inside a segment, about: itself and its gradient, what the second backward pass
# saves of both, and in bfloat16 what 16 bits change of both. Some are shared, as inputs are with outputs.
_INSIDE = 4


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


def segments_of(graph: fx.Graph, shared: Mapping[fx.Node, Any], kept: float, passed: float) -> tuple[Segment, ...]:
    """Divide ``graph`` so that running it needs the least memory, or little more with fewer segments.

    A storage that is written into is not divided. Of several segments, the last is the output alone, where it reads
    single tensors.

    Args:
        graph: flat.
        shared: its values that share a storage that is written into.
        kept: the number of float32 tensors kept for each value that a segment gives, until the segment is done.
        passed: the number of further ones, for a value that passes from earlier segments to the one that runs.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    if any(isinstance(node.target, HigherOrderOperator) for node in nodes):
        return whole(graph)  # which may write into anything
    best = _Places.of(nodes, shared, kept, passed).best_cuts()
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
        sizes: elements of all nodes before each node, and at the end of all.
        last: by node, the last that reads it.
        own: by node, the elements of its value.
        ends: the cuts to look at, with the start and the end of the graph.
        passing: the elements that pass each of ``ends``.
        kept, passed: as for :func:`segments_of`.
    """

    sizes: Sequence[int]
    last: Sequence[int]
    own: Sequence[int]
    ends: Sequence[int]
    passing: Sequence[float]
    kept: float
    passed: float

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], shared: Mapping[fx.Node, Any], kept: float, passed: float) -> _Places:
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
        is_open = [not count for count in itertools.accumulate(barred)]
        near = (i for i in range(1, len(nodes)) if is_open[i] and passing[i] <= min(passing[i - 1 : i + 2]))
        ends = [0, *sorted(sorted(near, key=passing.__getitem__)[:_PLACES]), len(nodes)]
        made = (size if moves(node) else 0 for node, size in zip(nodes, own, strict=True))
        sizes = list(itertools.accumulate(made, initial=0))
        return cls(sizes, last, own, ends, [passing[i] for i in ends], kept, passed)

    def inside(self, j: int, k: int) -> float:
        """Estimate the elements held for the values between two of ``ends`` while their segment is differentiated."""
        return _INSIDE * (self.sizes[self.ends[k]] - self.sizes[self.ends[j]])

    def best_cuts(self) -> tuple[int, ...]:
        """Return the cuts that need the least memory, or little more where less passes them."""
        alive = self._alive()
        most = self.inside(0, len(self.ends) - 1)
        least = most / (2 * len(self.ends) ** 2)
        while most > _CLOSE * least:
            middle = math.sqrt(most * least)
            most, least = (most, middle) if self._cuts(middle, alive) is None else (middle, least)
        return self._cuts(_MORE * most, alive) or ()

    def _alive(self) -> list[list[int]]:
        """By each of ``ends``, the nodes before it that are read behind it."""
        return [[i for i in range(end) if self.last[i] >= end] for end in self.ends]

    def _cuts(self, most: float, alive: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Choose the cuts that the least elements pass, with at most ``most`` held at a time; None if there are none.

        What earlier segments give adds to the memory of each later one. So the best cuts up to a place are part of the
        best cuts up to any later one.
        """
        best = [(0.0, 0)]  # for each of ``ends``: the elements given before it, and the cut before it
        for k in range(1, len(self.ends)):
            found = (math.inf, 0)
            for j in reversed(range(k)):
                inside, before = self.inside(j, k), best[j][0]
                if inside > most:
                    break  # and from farther back still more
                if inside + self.kept * before + self.passed * self.passing[j] <= most:
                    given = sum(self.own[i] for i in alive[k] if i >= self.ends[j])
                    found = min(found, (before + given, j))
            best.append(found)
        if best[-1][0] == math.inf:
            return None
        cuts, k = list[int](), len(self.ends) - 1
        while k := best[k][1]:
            cuts.append(self.ends[k])
        return tuple(reversed(cuts))


def _passes(node: fx.Node) -> bool:
    """True if the node gives a single tensor or number."""
    return isinstance(value(node), (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)) and len(tensors(node)) <= 1
