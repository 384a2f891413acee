"""torch.autocast's dispatch on a graph: one walk forwards, without neighbours and without taint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autocastfx.graph.any_size import concrete_sizes, dtypes_of
from autocastfx.graph.node import tensors, value
from autocastfx.passes.state import Pass, Policy, State
from autocastfx.passes.torch_autocast.dispatch import Dispatch, Followed
from autocastfx.plan.plan import Cause, Decision, Placement, Precision

__all__ = ["Follow", "dispatch_of", "follow"]


def follow(graph: fx.Graph, decisions: Mapping[fx.Node, Decision], dispatch: Dispatch) -> Followed:
    """Place each computing node of ``graph`` as torch.autocast would dispatch it.

    Args:
        graph: expanded, with abstract values.
        decisions: one for every ``call_*`` node.
        dispatch: which inputs are cast.

    Raises:
        UnsupportedError: torch.autocast itself refuses the dtypes that a ``promote`` op reads.
    """
    concrete = concrete_sizes(graph)
    values: dict[fx.Node, object] = {}
    placements: dict[fx.Node, Placement] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node not in decisions:
            values[node] = concrete(value(node))
            continue
        precision, why = dispatch.decide(decisions[node].category, node, values)
        values[node] = dispatch.value(node, precision, values, concrete(value(node)))
        placements[node] = Placement(precision, _stored(dtypes_of(values[node]), dispatch.low), Cause(why))
    return Followed(dispatch, placements, {node: dtypes_of(abstract) for node, abstract in values.items()})


def _stored(found: tuple[torch.dtype, ...], low: torch.dtype) -> Precision:
    floating = {dtype for dtype in found if dtype.is_floating_point}
    if not floating:
        return Precision.CAPTURED
    return {frozenset({low}): Precision.LOW, frozenset({torch.float32}): Precision.FLOAT32}.get(
        frozenset(floating), Precision.GIVEN
    )


class Follow(Pass):
    """Places as torch.autocast dispatches, for a list that says ``placement: follow``."""

    name = "follow"
    rewrites = False

    def __call__(self, state: State) -> State:
        """The state with placements.

        Raises:
            UnsupportedError: torch.autocast itself refuses the dtypes that a ``promote`` op reads.
        """
        dispatch = dispatch_of(self.policy, state.graph)
        followed = follow(state.graph, state.classification.decisions, dispatch)
        return replace(state, followed=followed, placements=followed.placements)


def dispatch_of(policy: Policy, graph: fx.Graph) -> Dispatch:
    """The dispatch of the ops of ``graph`` on the device that it was captured on."""
    inputs = (t for n in graph.nodes if n.op in ("placeholder", "get_attr") for t in tensors(n) if t.ndim)
    return Dispatch(policy.op_list, policy.low, next((t.device.type for t in inputs), "cpu"))
