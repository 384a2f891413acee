"""Merges what a model computes twice from the same values, in place: each layer the mask that the one before made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.alias import alias_sets, is_handed_out, seen_by_functions
from autocastfx.graph import is_float32
from autocastfx.patterns import REPEATED
from autocastfx.plan import Recomposed
from autocastfx.schema import schema

__all__ = ["merge_repeated"]


def merge_repeated(
    graph: fx.Graph, rule: Callable[[fx.Node], object], recomposed: Sequence[Recomposed] = ()
) -> tuple[Recomposed, ...]:
    """Let the readers of each repeated float32 value read the first of its kind, and erase the others.

    Repeated is a call of the same operator of torch's with the same arguments. Not one that is random, keeps running
    statistics, shares storage that is written to or may be, or is handed out.

    Args:
        graph: captured, with abstract values.
        rule: that decides a node; where it differs, the results may.
        recomposed: what was so far.

    Returns:
        ``recomposed``, and what was merged.
    """
    shared = alias_sets(graph).keys() | seen_by_functions(graph)
    first: dict[tuple[object, str], fx.Node] = {}
    found: dict[fx.Node, list[str]] = {}
    for node in list(graph.nodes):
        if _is_pure(node) and node not in shared and not is_handed_out(node):
            call = f"{node.args} {node.kwargs}"  # as text, in which 1, 1.0 and True differ, and 0.0 and -0.0
            kept = first.setdefault((node.target, call), node)
            if kept is not node and rule(kept) == rule(node):
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
                found.setdefault(kept, []).append(node.name)
    kept_for = {name: kept.name for kept, names in found.items() for name in names}
    before = (replace(one, node=kept_for.get(one.node, one.node)) for one in recomposed)
    return (*before, *(Recomposed(REPEATED, kept.name, tuple(names)) for kept, names in found.items()))


def _is_pure(node: fx.Node) -> bool:
    """Whether ``node`` gives the same float32 value whenever it is called."""
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not is_float32(node):
        return False
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return not (is_random or op._schema.is_mutable or "running_mean" in schema(op).names)
