"""The casts of torch.autocast as nodes: one for each reader, but one for all readers of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.graph.node import Use, tensors, value
from autocastfx.graph.sizes import concrete_sizes, dtypes_of
from autocastfx.passes.casts import CastStyle, PlannedDtypes, insert_casts
from autocastfx.passes.state import Pass, Settings, State
from autocastfx.passes.torch_autocast.dispatch import Dispatch, Followed, asked
from autocastfx.plan.plan import Cause, Decision, Placement, Precision

# torch.autocast's dispatch on a graph: one walk forwards, without neighbours and without taint. Pure.


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


def _stored(dtypes: tuple[torch.dtype, ...], low: torch.dtype) -> Precision:
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
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
        dispatch = dispatch_of(self.settings, state.graph)
        followed = follow(state.graph, state.classification.decisions, dispatch)
        return replace(state, followed=followed, placements=followed.placements)


def dispatch_of(settings: Settings, graph: fx.Graph) -> Dispatch:
    """The dispatch of the ops of ``graph`` on the device that it was captured on."""
    inputs = (t for n in graph.nodes if n.op in ("placeholder", "get_attr") for t in tensors(n) if t.ndim)
    return Dispatch(settings.op_list, settings.low, next((t.device.type for t in inputs), "cpu"))


@dataclass(frozen=True)
class FollowedDtypes(PlannedDtypes):
    """The dtypes of a graph as torch.autocast runs it.

    Attributes:
        followed: how it runs it.
        captured: dtypes of the captured nodes' values.
        keep_output_dtype: cast the graph's outputs back to their captured dtype.
    """

    followed: Followed
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]]
    keep_output_dtype: bool = True

    def read(self, node: fx.Node, use: Use, source: fx.Node) -> torch.dtype | None:
        """The dtype that torch.autocast casts to; for what it does not run itself the captured one."""
        dispatch, placement = self.followed.dispatch, self.followed.placements.get(node)
        was, now = self.captured.get(source, ()), self.followed.dtypes.get(source, ())
        to: torch.dtype | None = None
        if node.op == "output" or (placement is not None and dispatch.takes_captured(node, placement.run)):
            to = was[0] if len(now) == 1 and (node.op != "output" or self.keep_output_dtype) else None
        elif placement is not None and not dispatch.asks(node, placement.run):
            to = dispatch.dtype(placement.run)
        return to if now != (to,) and self._eligible(source) else None

    def gives(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        """The dtypes that torch.autocast makes."""
        return self.followed.dtypes.get(node, ())

    def _eligible(self, source: fx.Node) -> bool:
        members = tensors(source)
        floating = [d.is_floating_point and d != torch.float64 for d in self.followed.dtypes[source]]
        return len(members) == 1 and floating == [True] and members[0].device.type == self.followed.dispatch.device


class InsertFollowedCasts(Pass):
    """Puts the casts in that torch.autocast makes."""

    name = "insert casts"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        if state.followed is None:
            return state
        low = state.followed.dispatch.low
        insert_casts(state.graph, self._planned(state), CastStyle("follow", low, for_each=True, once=state.cached))
        ask_for_dtypes(state.followed)
        return replace(state, planned=self._planned)

    def _planned(self, state: State) -> FollowedDtypes:
        return FollowedDtypes(cast("Followed", state.followed), state.dtypes, self.settings.keep_output_dtype)


def ask_for_dtypes(followed: Followed) -> None:
    """Give the nodes a dtype argument that torch.autocast asks for float32 in this way; in place."""
    for node, placement in followed.placements.items():
        if followed.dispatch.asks(node, placement.run):
            node.target, node.args, node.kwargs = asked(cast("OpOverload", node.target), node.args, node.kwargs)
