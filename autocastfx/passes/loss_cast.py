"""Takes out the model's own casts to float32 of scores for a cross entropy that is float32 by its list, in place.

The list makes that cast in any case, and the operator can do so itself: then no float32 copy of the scores is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autocastfx.alias import alias_sets
from autocastfx.cross_entropy import is_separable
from autocastfx.graph import argument, is_float32
from autocastfx.op_name import op_name
from autocastfx.patterns import LOSS_CAST
from autocastfx.plan import Recomposed
from autocastfx.rule import Category

__all__ = ["drop_loss_casts"]


def drop_loss_casts(graph: fx.Graph, category: Callable[[fx.Node], Category | None]) -> tuple[Recomposed, ...]:
    """Let each such cross entropy read, through the views between them, what the model's cast read.

    A cast stays that anything else reads, that is moved by more than views, or that changes more than the dtype; all
    stay where the list lets the cross entropy run in 16 bits.

    Args:
        graph: captured, with abstract values.
        category: of a node, by the list.
    """
    losses = [node for node in graph.nodes if is_separable(node) and category(node) is Category.DENY]
    written = alias_sets(graph) if losses else {}
    found: list[Recomposed] = []
    for loss in losses:
        node = argument(loss, "self")
        while node.op == "call_function" and len(node.users) == 1 and node not in written:
            source = node.args[0] if node.args else None
            if not isinstance(source, fx.Node) or node.all_input_nodes[0] is not source or not is_float32(source):
                break
            if _is_plain_cast(node):
                found.append(Recomposed(LOSS_CAST, source.name, (node.name,)))
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            elif category(node) is not Category.CLEAR:
                break
            node = source
    return tuple(found)


def _is_plain_cast(node: fx.Node) -> bool:
    is_cast = op_name(node) == "to" and node.target is torch.ops.aten.to.dtype
    return is_cast and argument(node, "dtype") == torch.float32 and argument(node, "memory_format") is None
