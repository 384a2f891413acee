"""The casts of torch.autocast as nodes: one for each reader, but one for all readers of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.dtypes import dtype_name
from autocastfx.graph.node import Origin, Use, map_uses, place_like, set_origin, tensors, uses, value
from autocastfx.graph.sizes import concrete_sizes, dtypes_of
from autocastfx.passes.state import Pass, Settings, State
from autocastfx.passes.torch_autocast.dispatch import Dispatch, Followed, asked
from autocastfx.plan.plan import Cause, Decision, Placement, Precision

__all__ = ["Follow", "InsertFollowedCasts", "dispatch_of", "follow", "recast"]


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


def dispatch_of(policy: Settings, graph: fx.Graph) -> Dispatch:
    """The dispatch of the ops of ``graph`` on the device that it was captured on."""
    inputs = (t for n in graph.nodes if n.op in ("placeholder", "get_attr") for t in tensors(n) if t.ndim)
    return Dispatch(policy.op_list, policy.low, next((t.device.type for t in inputs), "cpu"))


def recast(
    graph: fx.Graph,
    followed: Followed,
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]],
    *,
    cached: Mapping[str, int],
    keep_output_dtype: bool,
) -> None:
    """Insert casts and dtype arguments into ``graph``, in place.

    Args:
        graph: expanded, with abstract values.
        followed: how torch.autocast runs it.
        captured: output dtypes of the captured nodes.
        cached: ``get_attr`` targets whose cast to 16 bits is made once, each with a number that tied ones share.
        keep_output_dtype: cast the graph's outputs back to their captured dtype.
    """
    run = _Run(graph, followed, captured, cached)
    for node in list(graph.nodes):
        if node.op == "output":
            if keep_output_dtype:
                run.back(node)
        elif node in followed.placements:
            run.visit(node, followed.placements[node].run)


@dataclass
class _Run:
    graph: fx.Graph
    followed: Followed
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]]
    cached: Mapping[str, int]
    made: dict[int, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dispatch = self.followed.dispatch

    def visit(self, node: fx.Node, precision: Precision) -> None:
        if self.dispatch.takes_captured(node, precision):
            self.back(node)
        elif self.dispatch.asks(node, precision):
            node.target, node.args, node.kwargs = asked(cast("OpOverload", node.target), node.args, node.kwargs)
        elif (to := self.dispatch.dtype(precision)) is not None:
            self._substitute(node, {i: self._cast(use.node, to, node) for i, use in self._cast_uses(node, to)})

    def back(self, node: fx.Node) -> None:
        """Give ``node`` its inputs in the dtypes that they have in the captured graph."""
        casts: dict[int, fx.Node] = {}
        for i, use in enumerate(uses(node)):
            was, now = self.captured[use.node], self.followed.dtypes[use.node]
            if len(now) == 1 and was != now and self._eligible(use):
                casts[i] = self._cast(use.node, was[0], node)
        self._substitute(node, casts)

    def _cast_uses(self, node: fx.Node, to: torch.dtype) -> Iterator[tuple[int, Use]]:
        """The uses that are cast, in torch's order: the last argument first, the members of a list in theirs.

        The order decides in which the gradients of a value that is read twice are added.
        """
        numbered = list(enumerate(uses(node)))
        arguments = dict.fromkeys(use.argument for _, use in numbered)
        for argument in reversed(arguments):
            for i, use in numbered:
                if use.argument == argument and self._eligible(use) and self.followed.dtypes[use.node] != (to,):
                    yield i, use

    def _eligible(self, use: Use) -> bool:
        found = tensors(use.node)
        floating = [d.is_floating_point and d != torch.float64 for d in self.followed.dtypes[use.node]]
        return len(found) == 1 and floating == [True] and found[0].device.type == self.dispatch.device

    def _cast(self, read: fx.Node, to: torch.dtype, reader: fx.Node) -> fx.Node:
        number = self.cached.get(str(read.target)) if read.op == "get_attr" and to == self.dispatch.low else None
        if number is not None and number in self.made:
            return self.made[number]
        suffix = dtype_name(to)
        with self.graph.inserting_before(reader):
            made = self.graph.create_node(
                "call_function", torch.ops.aten.to.dtype, (read, to), {}, f"{read.name}_{suffix}"
            )
        place_like(made, reader)
        set_origin(made, Origin("recast", "reader" if number is None else "parameter", read.name))
        if number is not None:
            self.made[number] = made
        return made

    def _substitute(self, node: fx.Node, casts: Mapping[int, fx.Node]) -> None:
        count = iter(range(len(uses(node))))
        map_uses(node, lambda _, read: casts.get(next(count), read))


class InsertFollowedCasts(Pass):
    """Puts the casts in that torch.autocast makes."""

    name = "insert casts"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        if state.followed is not None:
            keeps = self.policy.keep_output_dtype
            recast(state.graph, state.followed, state.dtypes, cached=state.cached, keep_output_dtype=keeps)
        return state
