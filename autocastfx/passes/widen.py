"""Raise nodes of a 16-bit model to float32, and widen what they read."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.alias import alias_sets, seen_by_functions
from autocastfx.graph.node import (
    Origin,
    argument,
    dtypes,
    is_member,
    map_uses,
    origin,
    place_like,
    set_argument,
    set_origin,
    tensors,
    value,
)
from autocastfx.passes.analysis.widening import Widener
from autocastfx.passes.state import Classification, Pass, State
from autocastfx.plan.edited_plan import Obeyed
from autocastfx.plan.plan import Decision, Forced, Placement, Precision
from autocastfx.policy.rule import Category

__all__ = ["InsertWidenings", "WidenNodes", "insert_widenings"]


# Decides which nodes of a 16-bit model run in float32: those that the lists deny. Pure: no edge is touched.


class WidenNodes(Pass):
    """Raises what the lists deny, and places the rest as the model has it; then as an edited plan says."""

    name = "widen nodes"
    rewrites = False

    def __call__(self, state: State) -> State:
        """The state with decisions, placements, and the dtypes that they lead to.

        Raises:
            BannedOpError: the list bans an op.
            PlanError: the edited plan asks for what cannot be.
        """
        policy, graph = self.policy, state.graph
        fixed = alias_sets(graph).keys() | seen_by_functions(graph, state.attributes)
        widener = Widener(policy.matcher, policy.facts, policy.low, policy.keep_output_dtype)
        decisions = widener.decide(graph, fixed)
        placements = widener.place(decisions, fixed)
        if policy.plan is not None:
            obeyed = policy.plan.obey(decisions, placements, {}, state.prefix)
            pinned = {**obeyed.pinned, **{node: _pinned(node, obeyed) for node in obeyed.lines}}
            pinned = widener.settle(graph, pinned)
            decisions, placements = replace(obeyed, pinned=pinned).result(widener.place(pinned, fixed))
        wide = {node for node, placed in placements.items() if placed.store is Precision.FLOAT32}
        after = {
            node: tuple(torch.float32 if node in wide and d == policy.low else d for d in found)
            for node, found in state.dtypes.items()
        }
        return replace(
            state, classification=Classification(decisions, frozenset()), placements=placements, raised=after
        )


def _pinned(node: fx.Node, obeyed: Obeyed) -> Decision:
    """The decision from which the placement follows that the plan's line asks for."""
    line, decision, usual = obeyed.lines[node], obeyed.decisions[node], obeyed.usual[node]
    if decision.source is Forced.STAYS_LOW or is_member(node) or not tensors(node):
        return decision
    if line.moves(usual):
        is_raised = (line.run or usual.run) is Precision.FLOAT32
        return replace(obeyed.pinned[node], category=Category.DENY if is_raised else Category.KEEP)
    if line.category in (None, decision.category):
        pins = {Precision.FLOAT32: Category.DENY, Precision.LOW: Category.KEEP}
        return replace(decision, category=pins.get(usual.run, decision.category))
    return obeyed.pinned[node]


# The pass that widens what raised nodes of a 16-bit model read, and rounds what they give to others.

_TO = torch.ops.aten.to.dtype


def insert_widenings(
    graph: fx.Graph, placements: Mapping[fx.Node, Placement], low: torch.dtype, *, keep_output_dtype: bool
) -> None:
    """Insert casts into ``graph``, in place: one for each value and dtype.

    Args:
        graph: captured, with abstract values.
        placements: one for every ``call_*`` node.
        low: the 16-bit dtype of the model.
        keep_output_dtype: cast raised outputs back to it.
    """
    run = _Run(graph, placements, low, keep_output_dtype, alias_sets(graph).keys())
    for node in list(graph.nodes):
        run.visit(node)


@dataclass
class _Run:
    graph: fx.Graph
    placements: Mapping[fx.Node, Placement]
    low: torch.dtype
    keep_output_dtype: bool
    written: Set[fx.Node]
    casts: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])  # value → it in its other dtype

    def visit(self, node: fx.Node) -> None:
        if origin(node) is not None:  # a cast of an earlier run
            return
        placement = self.placements.get(node)
        is_wide = self._is_wide(node)
        own: dict[fx.Node, fx.Node] = {}  # casts for this reader alone

        def wanted(name: str, read: fx.Node) -> fx.Node:
            as_stored = placement.as_stored if placement is not None else ()
            is_one = isinstance(value(read), torch.Tensor) and dtypes(read) == (self.low,)
            goes_out = node.op == "output" and not self.keep_output_dtype
            if not is_one or goes_out or name in as_stored or self._is_wide(read) == is_wide:
                return read
            made = own if read in self.written else self.casts
            if read not in made:
                made[read] = self._cast(read, torch.float32 if is_wide else self.low, node)
            return made[read]

        map_uses(node, wanted)
        if is_wide and placement is not None and argument(node, "dtype") == self.low:  # a cast of the model
            set_argument(node, "dtype", torch.float32)

    def _is_wide(self, node: fx.Node) -> bool:
        placement = self.placements.get(node)
        return placement is not None and placement.store is Precision.FLOAT32

    def _cast(self, read: fx.Node, to: torch.dtype, reader: fx.Node) -> fx.Node:
        by_reader = read.op in ("placeholder", "get_attr") or read in self.written
        with self.graph.inserting_before(reader if by_reader else read.next):
            made = self.graph.create_node("call_function", _TO, (read, to), {}, f"{read.name}_{dtype_name(to)}")
        place_like(made, read)
        set_origin(made, Origin("rewrite", "mutated" if read in self.written else "reader", read.name))
        return made


class InsertWidenings(Pass):
    """Puts the casts in that raised nodes need."""

    name = "insert widenings"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        insert_widenings(
            *(state.graph, state.placements, self.policy.low), keep_output_dtype=self.policy.keep_output_dtype
        )
        return state
