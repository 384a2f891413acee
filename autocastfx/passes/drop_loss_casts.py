"""Takes out the model's own casts to float32 of scores for a cross entropy that is float32 by its list, in place.

The list makes that cast in any case, and the operator can do so itself: then no float32 copy of the scores is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import argument, is_float32
from autocastfx.graph.op_name import op_name
from autocastfx.passes.analysis.cross_entropy import is_over_classes
from autocastfx.passes.patterns.patterns import LOSS_CAST
from autocastfx.plan.plan import Recomposed
from autocastfx.policy.rule import Category

__all__ = ["drop_loss_casts"]

# Ops that only move values, each to one place: in backward nothing adds up, which float32 would do with less error.
_MOVES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten", "contiguous", "clone", "alias", "transpose",
          "permute", "t", "squeeze", "unsqueeze", "slice", "select", "narrow")  # fmt: skip


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
        while len(node.users) == 1 and node not in written and (_is_plain_cast(node) or _moves(node)):
            source = argument(node, "self")
            if _is_plain_cast(node):
                if not is_float32(source) or category(node) in (Category.BAN, Category.KEEP):
                    break
                found.append(Recomposed(LOSS_CAST, loss.name, (node.name,)))
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            node = source
    return tuple(found)


def _moves(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node) in _MOVES


def _is_plain_cast(node: fx.Node) -> bool:
    is_cast = node.target is torch.ops.aten.to.dtype
    return is_cast and argument(node, "dtype") == torch.float32 and argument(node, "memory_format") is None
