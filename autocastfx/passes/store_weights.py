"""Where 16-bit weights come from without a cast in each call: from working copies, or from parameters stored low."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, aliased
from autocastfx.graph.black_box import is_opaque
from autocastfx.graph.node import Origin, is_float32, origin, set_origin, set_value, tensors, uses
from autocastfx.passes.analysis.ports import Ports
from autocastfx.plan.plan import Decision, Placement, Precision
from autocastfx.policy.rule import Category
from autocastfx.runtime.working_copies import ATTRIBUTE, working_copy

__all__ = ["LowReads", "lower_views", "read_copies", "store_low"]

_TO = torch.ops.aten.to.dtype
VIEW = "a view of a 16-bit weight"


@dataclass(frozen=True)
class LowReads:
    """Which values are read low only, by given placements."""

    placements: Mapping[fx.Node, Placement]
    ports: Ports

    def all_of(self, value: fx.Node) -> bool:
        """Whether ``value`` is read, and every reader casts it to 16 bits."""
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
            found[node] = Placement(Precision.LOW, Precision.LOW, VIEW)
            lowered.add(node)
    return found


def _is_view(node: fx.Node, parameters: frozenset[str], views: set[fx.Node]) -> bool:
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or not is_float32(node):
        return False
    (source,) = node.all_input_nodes
    of_weight = source in views or (source.op == "get_attr" and source.target in parameters)
    return of_weight and source in aliased(node) and all(_is_injective(t) for t in tensors(node))


def _is_injective(view: torch.Tensor) -> bool:
    """Whether no two elements of ``view`` share memory."""
    if not all(isinstance(size, int) for size in (*view.shape, *view.stride())):
        return False
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def read_copies(graph: fx.Graph, parameters: frozenset[str], placements: Mapping[fx.Node, Placement]) -> None:
    """Replace the casts of parameters to 16 bits by reads of working copies, in place.

    A view that :func:`lower_views` made low has a read of its own, as it had a cast of its own. Copies are looked at
    anew after whatever may have changed a parameter unseen.
    """
    copies: fx.Node | None = None
    casts = set(_casts(graph, parameters))
    for cast_node in list(graph.nodes):
        copies = None if is_opaque(cast_node) else copies
        if cast_node not in casts:
            continue
        master, dtype = cast_node.args[:2]
        if copies is None:
            with graph.inserting_before(cast_node):
                copies = graph.create_node("get_attr", ATTRIBUTE)
        placed = {reader: placements[reader].because if reader in placements else "" for reader in cast_node.users}
        apart = [reader for reader in placed if placed[reader] == VIEW]
        shared = [reader for reader in placed if placed[reader] != VIEW]
        apart = apart if shared else apart[1:]
        cast_node.target, cast_node.args = working_copy, (copies, master, dtype)
        set_origin(cast_node, Origin("store_weights", "working copy", cast("fx.Node", master).name))
        reads = [cast_node]
        for reader in apart:
            with graph.inserting_before(reader):
                made = graph.create_node("call_function", working_copy, cast_node.args, {}, cast_node.name)
            made.meta.update(cast_node.meta)
            reader.replace_input_with(cast_node, made)
            reads.append(made)
        for read in (read for read in reads if _is_read_often(read)):
            read.args = (*read.args, True)


def _is_read_often(value: fx.Node) -> bool:
    """Whether several gradients of ``value`` may add up: an op that takes a list of weights may read one many times."""
    read = [(reader, use) for reader in value.users for use in uses(reader) if use.node is value]
    return len(read) > 1 or any(value not in (*r.args, *r.kwargs.values()) for r, _ in read)


def store_low(graph: fx.Graph, tensors_of: Mapping[str, int], low: torch.dtype) -> None:
    """Take parameters as stored in 16 bits, in place: those that every reader casts to 16 bits.

    Args:
        graph: rewritten.
        tensors_of: the names of parameters, each with a number that tied ones share.
        low: the 16-bit dtype.
    """
    casts = set(_casts(graph, frozenset(tensors_of)))
    groups: dict[int, list[fx.Node]] = {}
    for node in (n for n in graph.nodes if n.op == "get_attr" and n.target in tensors_of):
        groups.setdefault(tensors_of[str(node.target)], []).append(node)
    for nodes in groups.values():
        if all(node.users and casts.issuperset(node.users) for node in nodes):
            for node in nodes:
                for cast_node in list(node.users):
                    cast_node.replace_all_uses_with(node)
                    graph.erase_node(cast_node)
                for abstract in tensors(node):
                    set_value(node, abstract.to(low))


def _casts(graph: fx.Graph, parameters: frozenset[str]) -> Iterator[fx.Node]:
    """The casts to 16 bits that a pass put directly after a parameter, for all that read it low."""
    for node in graph.nodes:
        mark = origin(node)
        if mark is None or mark.rule not in ("reader", "parameter") or node.target is not _TO:
            continue
        source, dtype = node.args[:2]
        is_weight = isinstance(source, fx.Node) and source.op == "get_attr" and source.target in parameters
        if is_weight and dtype != torch.float32:
            yield node
