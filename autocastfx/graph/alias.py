"""Find values of a graph that share storage, and the nodes that write into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.graph.node import tensors, uses
from autocastfx.graph.op_name import op_name
from autocastfx.graph.reachable import reachable
from autocastfx.graph.schema import schema

__all__ = ["AliasSet", "alias_sets", "aliased", "handed_out", "moves", "mutated_inputs", "seen_by_functions"]


def mutated_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that ``node`` writes into, by its schema."""
    written = schema(node.target).written if isinstance(node.target, OpOverload) else ()
    return tuple(u.node for u in uses(node) if u.argument in written) if written else ()


def moves(node: fx.Node) -> bool:
    """True for a node that reads and writes elements; false for views and members of a tuple."""
    return bool(mutated_inputs(node)) or not any(aliased(node))


@dataclass(frozen=True)
class AliasSet:
    """Values that share a mutated storage: the node that made it (``root``), and all that view or mutate it."""

    root: fx.Node
    members: frozenset[fx.Node]


def alias_sets(
    graph: fx.Graph, written_by: Callable[[fx.Node], tuple[fx.Node, ...]] = mutated_inputs
) -> dict[fx.Node, AliasSet]:
    """Return, for each value with mutated storage, its alias set. A writer is in the set that it writes to.

    Sharing is known from the storages of the abstract values, and from the alias annotations of the operators' schemas
    (a view that copies in the abstract run may alias in a real one).
    """
    written = {target for node in graph.nodes for target in mutated_inputs(node)}
    if not written:
        return {}
    parent: dict[fx.Node, fx.Node] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}

    def find(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    def union(a: fx.Node, b: fx.Node) -> None:
        first, second = sorted((find(a), find(b)), key=order.__getitem__)
        parent[second] = first

    owners: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for tensor in (t for t in tensors(node) if t.layout == torch.strided):
            union(owners.setdefault(_storage_id(tensor), node), node)
        for use in aliased(node):
            union(use, node)
        for target in written_by(node):
            union(target, node)
    roots = {find(node) for node in written}
    members: dict[fx.Node, set[fx.Node]] = {root: set() for root in roots}
    for node in graph.nodes:
        if find(node) in roots:
            members[find(node)].add(node)
    sets = {root: AliasSet(root, frozenset(found)) for root, found in members.items()}
    return {node: one for one in sets.values() for node in one.members}


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def aliased(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs that an output of ``node`` may share storage with."""
    if op_name(node) == "getitem":
        yield from node.all_input_nodes[:1]
    elif isinstance(node.target, OpOverload) and (sharing := schema(node.target).shared):
        yield from (u.node for u in uses(node) if u.argument in sharing)


def seen_by_functions(graph: fx.Graph) -> set[fx.Node]:
    """Return the values read, directly or as an alias, by functions without a schema, which may write into them."""
    opaque = (n for n in graph.nodes if n.op == "call_function" and not isinstance(n.target, OpOverload))
    starts = (read for node in opaque for read in node.all_input_nodes if tensors(read))
    return set(reachable(starts, lambda node: (*aliased(node), *(r for r in node.users if node in aliased(r)))))


def handed_out(graph: fx.Graph) -> set[fx.Node]:
    """Return the outputs, and the values that they may be views of."""
    return set(reachable(graph.output_node().all_input_nodes, aliased))
