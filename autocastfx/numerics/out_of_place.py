"""Replace ops that write into what they read, where no other value shows it: ``relu_`` becomes ``relu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.graph.alias import AliasSet, alias_sets, mutated_inputs
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import dtypes
from autocastfx.numerics.flat_graph import FlatGraph

__all__ = ["write_out_of_place"]


def write_out_of_place(flat: FlatGraph) -> None:
    """Replace the ops in ``flat``, in place.

    A storage keeps its writers if one of them has no op to take its place, or if its values from before a write are
    read later: those show the write.

    Args:
        flat: a graph; ``flat.ops`` keeps the names that ops had.
    """
    order = {node: i for i, node in enumerate(flat.graph.nodes)}
    for shared in {one.root: one for one in alias_sets(flat.graph).values()}.values():
        found = dict(_replaced(shared, order))
        if found and None not in found.values():
            for writer, target in found.items():
                flat.ops[writer] = op_name(writer)
                writer.target = cast("OpOverload", target)


def _replaced(shared: AliasSet, order: dict[fx.Node, int]) -> Iterator[tuple[fx.Node, OpOverload | None]]:
    """Each writer of a storage, with the op to take its place; None if there is none."""
    for writer in (node for node in shared.members if mutated_inputs(node)):
        before = [node for node in shared.members if order[node] < order[writer]]
        is_seen = any(order[user] > order[writer] for node in before for user in node.users)
        is_own = shared.root.op == "call_function" and mutated_inputs(writer) == tuple(writer.all_input_nodes[:1])
        yield writer, None if is_seen or not is_own else _out_of_place(writer)


def _out_of_place(writer: fx.Node) -> OpOverload | None:
    target = cast("OpOverload", writer.target)
    packet = getattr(getattr(torch.ops, target.namespace), base_name(op_name(writer)), None)
    found = getattr(packet, target._overloadname, None)
    read = {dtype for node in writer.all_input_nodes for dtype in dtypes(node) if dtype.is_floating_point}
    if not isinstance(found, OpOverload) or found is target or read != set(dtypes(writer)):  # it would promote
        return None
    ours, theirs = ([argument.name for argument in op._schema.arguments] for op in (target, found))
    return found if ours == theirs else None
