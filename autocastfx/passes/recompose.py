"""Replaces what a model writes out by the one operator that computes it, in place, before anything is decided.

Written out, one op of a chain may be float32 by its list, and that draws the others with it; the operator computes in
float32 inside and may take and give 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, is_view, reachable, takes_any_layout
from autocastfx.graph.names import op_name
from autocastfx.graph.node import (
    all_names,
    has_float32,
    is_float32,
    module_classes,
    place_like,
    set_value,
    stand_for,
    tensors,
    value,
)
from autocastfx.passes.analysis.finite import is_made_finite
from autocastfx.passes.patterns.pattern import Arguments, Pattern
from autocastfx.passes.patterns.patterns import PATTERNS
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Recomposed
from autocastfx.policy.rule import Category

__all__ = ["Recompose", "recompose"]

_READS_LAYOUT = ("view", "view_as", "_unsafe_view", "unflatten", "as_strided")


def recompose(
    graph: fx.Graph, patterns: Sequence[Pattern], ruled: Callable[[fx.Node], object], attributes: Mapping[str, Any]
) -> tuple[Recomposed, ...]:
    """Replace each occurrence of a pattern in ``graph``, in place, where no other value can change.

    An occurrence stays as it is if anything else reads a value inside it, if a value of it is not float32, if something
    writes into the storage of an input, or if the result is viewed and would be laid out in another way. Of two that
    overlap the longer is taken.

    Args:
        graph: captured, with abstract values.
        patterns: earlier ones are tried first.
        ruled: what the rules for modules say of a node; an occurrence in which that differs stays as it is.
        attributes: what ``get_attr`` nodes read, parameters and buffers apart.
    """
    ops = frozenset(op_name(node) for node in graph.nodes)
    patterns = [pattern for pattern in patterns if pattern.may_be_in(ops)]
    if not patterns:
        return ()
    mutated = set(alias_sets(graph))
    done: list[Recomposed] = []
    for node in reversed(graph.nodes):  # from the end: the last op of the longer comes first
        for pattern in patterns:
            occurrence = _occurrence(pattern, node, mutated, ruled, attributes)
            if occurrence is not None:
                arguments, inside = occurrence
                made = _made(graph, pattern, node, arguments)
                done.append(Recomposed(pattern.name, made.name, tuple(n.name for n in inside)))
                for replaced in reversed(inside):
                    graph.erase_node(replaced)
                break
    return tuple(reversed(done))


def _occurrence(
    pattern: Pattern,
    node: fx.Node,
    mutated: set[fx.Node],
    ruled: Callable[[fx.Node], object],
    attributes: Mapping[str, Any],
) -> tuple[Arguments, list[fx.Node]] | None:
    """The operator's arguments for the occurrence of ``pattern`` that ends at ``node``, and all its nodes in order."""
    for found, arguments in pattern.occurrences(node):
        sources = [held for held in found.values() if isinstance(held, fx.Node)]
        inside = _between(sources, node)
        if pattern.own_layout and _layout_is_read(node):
            return None
        is_closed = all(user in inside for n in inside if n is not node for user in n.users)
        is_plain = mutated.isdisjoint(sources) and all(_is_plain(n) for n in sources) and all(map(_is_wide, inside))
        is_one = is_plain and all(_device(n) == _device(node) for n in (*sources, *inside))
        is_finite = all(is_made_finite(found[name], attributes, mutated) for name in pattern.finite)
        if is_closed and is_one and is_finite and all(ruled(n) == ruled(node) for n in inside):
            return arguments, sorted(inside)
    return None


def _between(sources: Sequence[fx.Node], end: fx.Node) -> set[fx.Node]:
    """``end`` and all that it is computed from, up to ``sources``."""
    return set(reachable([end], lambda node: (read for read in node.all_input_nodes if read not in sources)))


def _layout_is_read(node: fx.Node) -> bool:
    """True if anything depends on the result's strides: a ``view`` of other strides may fail."""
    same_layout = reachable([node], lambda n: filter(_passes_layout, n.users))
    return any(op_name(user) in _READS_LAYOUT for each in same_layout for user in each.users)


def _passes_layout(node: fx.Node) -> bool:
    return op_name(node) == "dropout" or (is_view(node) and not takes_any_layout(node))


def _is_plain(node: fx.Node) -> bool:
    return is_float32(node) and _is_wide(node)


def _is_wide(node: fx.Node) -> bool:
    """True if the node computes with float32 alone; it may give integers too, as ``max`` does."""
    return has_float32(node) and all(
        t.layout == torch.strided and (t.dtype == torch.float32 or not t.dtype.is_floating_point) for t in tensors(node)
    )


def _device(node: fx.Node) -> torch.device:
    return tensors(node)[0].device


def _made(graph: fx.Graph, pattern: Pattern, node: fx.Node, arguments: Arguments) -> fx.Node:
    """The operator on ``arguments``, in the place of ``node``."""
    args, kwargs = arguments
    with graph.inserting_before(node):
        name = f"{node.name}_{pattern.op.rpartition('::')[2]}"
        made = graph.create_node("call_function", pattern.target, args, kwargs, name)
    place_like(made, node)
    set_value(made, value(node))
    stand_for(made, *all_names(node))
    node.replace_all_uses_with(made)
    return made


class Recompose(Pass):
    """Replaces formulas by operators: the patterns chosen, of which the list bans no operator."""

    name = "recompose"

    def __call__(self, state: State) -> State:
        """The state with what was recomposed."""
        rule = self.policy.op_list.rule
        found = recompose(
            state.graph,
            list(filter(self._is_wanted, PATTERNS)),
            lambda node: [kind for kind in module_classes(node) if rule(kind) is not None],
            state.attributes,
        )
        return state.with_recomposed((*state.recomposed, *found)) if found else state

    def _is_wanted(self, pattern: Pattern) -> bool:
        policy, rule = self.policy, self.policy.op_list.rule(pattern.op)
        is_banned = rule is not None and rule.category is Category.BAN
        has_range = policy.low == torch.bfloat16 or not pattern.needs_range
        return pattern.name in policy.recompose and has_range and not is_banned
