"""Merges, in place, float32 values that a model computes twice: T5 makes the same mask in each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autocastfx.graph.alias import alias_sets, handed_out, seen_by_functions
from autocastfx.graph.node import all_names, draws_random_numbers, is_float32, schema, stand_for, uses
from autocastfx.passes.patterns.patterns import REPEATED
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Recomposed

__all__ = ["MergeRepeated", "merge_repeated"]

_STATISTICS = ("running_mean", "running_var")  # norms that take them write to them, which their schemas do not say


def merge_repeated(
    graph: fx.Graph,
    attributes: Mapping[str, Any],
    rule: Callable[[fx.Node], object],
    recomposed: Sequence[Recomposed] = (),
) -> tuple[Recomposed, ...]:
    """Let the readers of each repeated float32 value read the first of its kind, and erase the others.

    Repeated is a call of the same operator of torch's with the same arguments. Not one that is random, that keeps or
    reads running statistics, that shares storage which is written to or may be, or reads such, or that is handed out.

    Args:
        graph: captured, with abstract values.
        attributes: the values of its ``get_attr`` nodes, parameters and buffers apart.
        rule: that decides a node; where it differs, the results may.
        recomposed: what was so far.

    Returns:
        ``recomposed``, and what was merged.
    """
    changing = alias_sets(graph).keys() | seen_by_functions(graph, attributes) | _statistics(graph)
    outputs = handed_out(graph)
    first: dict[tuple[object, str], fx.Node] = {}
    found: dict[fx.Node, list[str]] = {}
    for node in list(graph.nodes):
        if _is_pure(node) and node not in outputs and changing.isdisjoint((node, *node.all_input_nodes)):
            call = f"{node.args} {node.kwargs}"  # as text, in which 1, 1.0 and True differ, and 0.0 and -0.0
            kept = first.setdefault((node.target, call), node)
            if kept is not node and rule(kept) == rule(node):
                node.replace_all_uses_with(kept)
                stand_for(kept, *all_names(node))
                graph.erase_node(node)
                found.setdefault(kept, []).append(node.name)
    kept_for = {name: kept.name for kept, names in found.items() for name in names}
    before = (replace(one, node=kept_for.get(one.node, one.node)) for one in recomposed)
    return (*before, *(Recomposed(REPEATED, kept.name, tuple(names)) for kept, names in found.items()))


def _is_pure(node: fx.Node) -> bool:
    """True if ``node`` gives the same float32 value whenever it is called with the same numbers."""
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not is_float32(node):
        return False
    return not (draws_random_numbers(node) or op._schema.is_mutable or _keeps_statistics(node))


def _statistics(graph: fx.Graph) -> set[fx.Node]:
    """Return the running statistics of norms, and all values made of these by other ops."""
    norms = [node for node in graph.nodes if _keeps_statistics(node)]
    found = {use.node for norm in norms for use in uses(norm) if use.argument in _STATISTICS}
    names = {node.target for node in found if node.op == "get_attr"}
    for node in graph.nodes:
        is_kept = node.op == "get_attr" and node.target in names
        if is_kept or (not _keeps_statistics(node) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _keeps_statistics(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not set(_STATISTICS).isdisjoint(schema(node.target).names)


class MergeRepeated(Pass):
    """Merges float32 values that the model computes twice."""

    name = "merge repeated"

    def __call__(self, state: State) -> State:
        """The state with what was merged."""
        if REPEATED not in self.policy.recompose:
            return state
        found = merge_repeated(state.graph, state.attributes, self.policy.matcher, state.recomposed)
        return state.with_recomposed(found) if len(found) > len(state.recomposed) else state
