"""Decides which nodes of a 16-bit model run in float32: those that the lists deny. Pure: no edge is touched."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, seen_by_functions
from autocastfx.graph.node import is_member, tensors
from autocastfx.passes.analysis.raising import Raiser
from autocastfx.passes.state import Classification, Pass, State
from autocastfx.plan.edited_plan import Obeyed
from autocastfx.plan.plan import Decision, Forced, Precision
from autocastfx.policy.rule import Category

__all__ = ["RaiseNodes"]


class RaiseNodes(Pass):
    """Raises what the lists deny, and places the rest as the model has it; then as an edited plan says."""

    name = "raise nodes"
    rewrites = False

    def __call__(self, state: State) -> State:
        """The state with decisions, placements, and the dtypes that they lead to.

        Raises:
            BannedOpError: the list bans an op.
            PlanError: the edited plan asks for what cannot be.
        """
        policy, graph = self.policy, state.graph
        fixed = alias_sets(graph).keys() | seen_by_functions(graph, state.attributes)
        raiser = Raiser(policy.matcher, policy.facts, policy.low, policy.keep_output_dtype)
        decisions = raiser.decide(graph, fixed)
        placements = raiser.place(decisions, fixed)
        if policy.plan is not None:
            obeyed = policy.plan.obey(decisions, placements, {}, state.prefix)
            pinned = {**obeyed.pinned, **{node: _pinned(node, obeyed) for node in obeyed.lines}}
            pinned = raiser.settle(graph, pinned)
            decisions, placements = replace(obeyed, pinned=pinned).result(raiser.place(pinned, fixed))
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
