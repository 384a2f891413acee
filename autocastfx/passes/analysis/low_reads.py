"""The values that are read in 16 bits alone, and the views of weights that may be made so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, aliased
from autocastfx.graph.node import is_float32, tensors, uses
from autocastfx.passes.analysis.ports import Ports
from autocastfx.plan.plan import Cause, Decision, Placement, Precision, Why
from autocastfx.policy.rule import Category

__all__ = ["LowReads", "lower_views"]


@dataclass(frozen=True)
class LowReads:
    """Finds the values that are read low only, by given placements."""

    placements: Mapping[fx.Node, Placement]
    ports: Ports

    def all_of(self, value: fx.Node) -> bool:
        """True if ``value`` is read, and every reader casts it to 16 bits."""
        return bool(value.users) and all(self._reads(reader, value) for reader in value.users)

    def _reads(self, reader: fx.Node, value: fx.Node) -> bool:
        placement = self.placements.get(reader)
        if placement is None or placement.run is not Precision.LOW:
            return False
        read = [use for use in uses(reader) if use.node is value]
        return not any(u.argument in placement.as_stored or self.ports.stays_float32(reader, u) for u in read)


def lower_views(
    graph: fx.Graph,
    decisions: Mapping[fx.Node, Decision],
    placements: Mapping[fx.Node, Placement],
    parameters: frozenset[str],
    ports: Ports,
) -> dict[fx.Node, Placement]:
    """``placements`` with the float32 views of parameters that only low ops read made low, where that changes no bit.

    The cast before them is then one of the parameter itself. A view shows each element at most once, so that its
    backward adds nothing up in 16 bits; and it is read either by low ops alone, or by one further such view alone, so
    that all gradients meet where they did.
    """
    storages, found = alias_sets(graph, ports.written), dict(placements)
    views: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_view(node, parameters, views) and node not in storages and decisions[node].category is Category.CLEAR:
            views.add(node)
    reads, lowered = LowReads(placements, ports), set[fx.Node]()
    for node in (n for n in reversed(list(graph.nodes)) if n in views):
        was = placements[node]
        follows = len(node.users) == 1 and next(iter(node.users)) in lowered
        if (was.run, was.store) == (Precision.FLOAT32, Precision.FLOAT32) and (follows or reads.all_of(node)):
            found[node] = Placement(Precision.LOW, Precision.LOW, Cause(Why.VIEW_OF_WEIGHT))
            lowered.add(node)
    return found


def _is_view(node: fx.Node, parameters: frozenset[str], views: set[fx.Node]) -> bool:
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or not is_float32(node):
        return False
    (source,) = node.all_input_nodes
    of_weight = source in views or (source.op == "get_attr" and source.target in parameters)
    return of_weight and source in aliased(node) and all(_is_injective(t) for t in tensors(node))


def _is_injective(view: torch.Tensor) -> bool:
    """True if no two elements of ``view`` share memory."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
