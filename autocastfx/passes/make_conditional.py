"""The last step for a graph made without inputs: casts of values whose dtype is not known touch only what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autocastfx.graph.node import origin, set_value, value
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Placement, Precision
from autocastfx.runtime.operators.casts import cast_if

__all__ = ["MakeConditional"]


def make_conditional(
    graph: fx.Graph, placements: Mapping[fx.Node, Placement], guesses: Set[str], low: torch.dtype
) -> None:
    """Give the nodes of ``graph`` the dtypes that the plan says, and make a cast of a guessed value conditional.

    Args:
        graph: rewritten; changed in place.
        placements: of the captured nodes.
        guesses: names of the captured nodes that were taken for float32 without being known to be.
        low: the 16-bit dtype.
    """
    for node in graph.nodes:
        mark, placement = origin(node), placements.get(node)
        if mark is not None:
            if isinstance(dtype := node.args[1], torch.dtype):
                set_value(node, torch.empty(1, dtype=dtype))
                if mark.value in guesses:  # clamping an integer would make it a float
                    source = torch.float32 if dtype == low else low
                    node.target, node.args = cast_if, (node.all_input_nodes[0], source, dtype)
            else:
                set_value(node, value(node.all_input_nodes[0]))
        elif placement is not None and placement.run is Precision.LOW:
            set_value(node, pytree.tree_map(partial(_narrowed, low), value(node)))
    for node in reversed(list(graph.nodes)):
        if origin(node) is not None and not node.users:
            graph.erase_node(node)
    graph.lint()


def _narrowed(low: torch.dtype, leaf: object) -> object:
    return leaf.to(low) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf


class MakeConditional(Pass):
    """Makes casts of guessed values conditional, in a graph made without inputs."""

    name = "make conditional"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        if state.guesses is not None:
            make_conditional(state.graph, state.placements, state.guesses, self.policy.low)
        return state
