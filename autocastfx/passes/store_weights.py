"""Where 16-bit weights come from without a cast in each call: from working copies, or from parameters stored low."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import fx

from autocastfx.graph.alias import is_opaque
from autocastfx.graph.node import Origin, origin, set_origin, set_value, tensors
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Placement, Why
from autocastfx.runtime.working_copies import ATTRIBUTE, working_copy

__all__ = ["StoreWeights", "read_copies", "store_low"]

_TO = torch.ops.aten.to.dtype


def read_copies(graph: fx.Graph, parameters: frozenset[str], placements: Mapping[fx.Node, Placement]) -> None:
    """Replace the casts of parameters to 16 bits by reads of working copies, in place.

    A view that that is low has a read of its own, as it had a cast of its own. Copies are looked at
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
        causes = {reader: placements[reader].because.why for reader in cast_node.users if reader in placements}
        apart = [reader for reader in cast_node.users if causes.get(reader) is Why.VIEW_OF_WEIGHT]
        shared = [reader for reader in cast_node.users if reader not in apart]
        apart = apart if shared else apart[1:]
        cast_node.target, cast_node.args = working_copy, (copies, master, dtype)
        set_origin(cast_node, Origin("store_weights", "working copy", cast("fx.Node", master).name))
        for reader in apart:
            with graph.inserting_before(reader):
                made = graph.create_node("call_function", working_copy, cast_node.args, {}, cast_node.name)
            made.meta.update(cast_node.meta)
            reader.replace_input_with(cast_node, made)


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


class StoreWeights(Pass):
    """Reads 16-bit weights where ``weights="cached"`` or ``weights="low"`` keeps them."""

    name = "store weights"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        if self.policy.weights == "cached":
            read_copies(state.graph, state.parameters, state.placements)
        elif self.policy.weights == "low":
            store_low(state.graph, state.numbers, self.policy.low)
        return state
