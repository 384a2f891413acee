"""Raise nodes of a 16-bit model to float32, and widen what they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, seen_by_functions
from autocastfx.graph.node import Use, argument, is_member, set_argument, tensors, value
from autocastfx.passes.casts import CastStyle, PlannedDtypes, insert_casts
from autocastfx.passes.decide.widening import STAYS_LOW, Widener
from autocastfx.passes.state import Classification, Pass, State
from autocastfx.plan.edited_plan import Obeyed
from autocastfx.plan.plan import Decision, Placement, Precision
from autocastfx.policy.rule import Category

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
        settings, graph = self.settings, state.graph
        fixed = alias_sets(graph).keys() | seen_by_functions(graph, state.attributes)
        widener = Widener(settings.matcher, settings.facts, settings.low, settings.keep_output_dtype)
        decisions = widener.decide(graph, fixed)
        placements = widener.place(decisions, fixed)
        if settings.plan is not None:
            obeyed = settings.plan.obey(decisions, placements, {}, state.prefix)
            pinned = {**obeyed.pinned, **{node: _pinned(node, obeyed) for node in obeyed.lines}}
            pinned = widener.settle(graph, pinned)
            decisions, placements = replace(obeyed, pinned=pinned).result(widener.place(pinned, fixed))
        wide = {node for node, placed in placements.items() if placed.store is Precision.FLOAT32}
        after = {
            node: tuple(torch.float32 if node in wide and d == settings.low else d for d in dtypes)
            for node, dtypes in state.dtypes.items()
        }
        return replace(
            state, classification=Classification(decisions, frozenset()), placements=placements, widened=after
        )


def _pinned(node: fx.Node, obeyed: Obeyed) -> Decision:
    """The decision from which the placement follows that the plan's line asks for."""
    line, decision, usual = obeyed.lines[node], obeyed.decisions[node], obeyed.usual[node]
    if decision.source == STAYS_LOW or is_member(node) or not tensors(node):
        return decision
    if line.moves(usual):
        is_raised = (line.run or usual.run) is Precision.FLOAT32
        return replace(obeyed.pinned[node], category=Category.DENY if is_raised else Category.KEEP)
    if line.category in (None, decision.category):
        pins = {Precision.FLOAT32: Category.DENY, Precision.LOW: Category.KEEP}
        return replace(decision, category=pins.get(usual.run, decision.category))
    return obeyed.pinned[node]


# The pass that widens what raised nodes of a 16-bit model read, and rounds what they give to others.


@dataclass(frozen=True)
class WidenedDtypes(PlannedDtypes):
    """The dtypes of a 16-bit model of which some nodes run in float32.

    Attributes:
        placements: one for every ``call_*`` node.
        captured: dtypes before casts were put in.
        widened: the dtypes that the placements lead to.
        low: the 16-bit dtype of the model.
        keep_output_dtype: cast widened outputs back to it.
    """

    placements: Mapping[fx.Node, Placement]
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]]
    widened: Mapping[fx.Node, tuple[torch.dtype, ...]]
    low: torch.dtype
    keep_output_dtype: bool = True

    def read(self, node: fx.Node, use: Use, source: fx.Node) -> torch.dtype | None:
        """float32 for a 16-bit value that a widened node reads, and 16 bits for a widened value that another does."""
        is_one = isinstance(value(source), torch.Tensor) and self.captured.get(source) == (self.low,)
        goes_out = node.op == "output" and not self.keep_output_dtype
        placement = self.placements.get(node)
        if not is_one or goes_out or (placement is not None and use.argument in placement.as_stored):
            return None
        return torch.float32 if placement is not None and placement.run is Precision.FLOAT32 else self.low

    def gives(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        """The dtypes that the placements lead to."""
        return self.widened.get(node, ())


class InsertWidenings(Pass):
    """Puts the casts in that widened nodes need."""

    name = "insert widenings"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        graph, low = state.graph, self.settings.low
        insert_casts(graph, self._planned(state), CastStyle("rewrite", low, alias_sets(graph).keys()))
        for node, placement in state.placements.items():
            if placement.run is Precision.FLOAT32 and argument(node, "dtype") == low:  # a cast of the model
                set_argument(node, "dtype", torch.float32)
        return replace(state, planned=self._planned)

    def _planned(self, state: State) -> WidenedDtypes:
        widened, keeps = state.widened or {}, self.settings.keep_output_dtype
        return WidenedDtypes(state.placements, state.dtypes, widened, self.settings.low, keeps)
