"""Takes out the model's own casts to float32 of scores for a cross entropy that is float32 by its list, in place.

The list makes that cast in any case, and the operator can do so itself: then no float32 copy of the scores is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, moves_each_once
from autocastfx.graph.node import all_names, argument, is_float32, stand_for
from autocastfx.passes.analysis.cross_entropy import is_over_classes
from autocastfx.passes.patterns.patterns import LOSS_CAST
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Recomposed
from autocastfx.policy.rule import Category

__all__ = ["DropLossCasts", "drop_loss_casts"]


def drop_loss_casts(graph: fx.Graph, category: Callable[[fx.Node], Category | None]) -> tuple[Recomposed, ...]:
    """Let each such cross entropy read, through what lies between them and only moves values, what the cast read.

    A cast stays that anything else reads, that changes more than the dtype, or that the list bans or keeps; all stay
    where the list lets the cross entropy run in 16 bits.

    Args:
        graph: captured, with abstract values.
        category: of a node, by the list.
    """
    losses = [node for node in graph.nodes if is_over_classes(node) and category(node) is Category.DENY]
    written = alias_sets(graph).keys() if losses else ()
    found: list[Recomposed] = []
    for loss in losses:
        node = argument(loss, "self")
        while len(node.users) == 1 and node not in written and (_is_plain_cast(node) or moves_each_once(node)):
            source = node.all_input_nodes[0]
            if _is_plain_cast(node):
                if not is_float32(source) or category(node) in (Category.BAN, Category.KEEP):
                    break
                found.append(Recomposed(LOSS_CAST, loss.name, (node.name,)))
                node.replace_all_uses_with(source)
                stand_for(source, *all_names(node))
                graph.erase_node(node)
            node = source
    return tuple(found)


def _is_plain_cast(node: fx.Node) -> bool:
    is_cast = node.target is torch.ops.aten.to.dtype
    return is_cast and argument(node, "dtype") == torch.float32 and argument(node, "memory_format") is None


class DropLossCasts(Pass):
    """Drops the model's own casts to float32 before a cross entropy."""

    name = "drop loss casts"

    def __call__(self, state: State) -> State:
        """The state with what was dropped."""
        if LOSS_CAST not in self.policy.recompose:
            return state
        found = drop_loss_casts(state.graph, self.policy.category)
        return state.with_recomposed((*state.recomposed, *found)) if found else state
