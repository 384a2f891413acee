"""Chooses the precision that every node runs in and is stored in. Pure: no edge is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autocastfx.passes.analysis.bytes_moved import bytes_moved
from autocastfx.passes.analysis.folding import Folding
from autocastfx.passes.analysis.low_reads import LowReads, lower_views
from autocastfx.passes.analysis.place_cheaply import place_cheaply
from autocastfx.passes.analysis.place_simply import place_simply
from autocastfx.passes.analysis.units import Units, units_of
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Decision, Placement, Traffic

__all__ = ["Place"]


class Place(Pass):
    """Places by the cut, or by TensorFlow's rule for a list that asks for it, and then as an edited plan says."""

    name = "place"
    rewrites = False

    def __call__(self, state: State) -> State:
        """The state with placements and the bytes that they move.

        Raises:
            PlanError: the edited plan asks for what cannot be.
        """
        policy, found = self.policy, state.classification
        units = units_of(state.graph, found.decisions, policy.ports)
        simple = self._with_views(state, found.decisions, place_simply(found.decisions, units))
        placements = simple if policy.op_list.placement == "simple" else self._cheaply(state, units)
        if policy.plan is not None:
            obeyed = policy.plan.obey(found.decisions, placements, found.unable, state.prefix)
            state = replace(state, classification=replace(found, decisions=obeyed.pinned))
            units = units_of(state.graph, obeyed.pinned, policy.ports)
            decisions, placements = obeyed.result(self._cheaply(state, units))
            state = replace(state, classification=replace(found, decisions=decisions))
        traffic = Traffic(self._moved(state, units, placements), self._moved(state, units, simple))
        return replace(state, placements=placements, traffic=traffic)

    def _cheaply(self, state: State, units: Units) -> dict[fx.Node, Placement]:
        policy, decisions = self.policy, state.classification.decisions
        folding = Folding(policy.ports, policy.fold, policy.low_name)
        placed = place_cheaply(
            *(state.graph, decisions, units),
            folds=folding(state.graph, decisions, state.classification.wide),
            keep_output_dtype=policy.keep_output_dtype,
            parameters=state.parameters,
            rounds=policy.fold == "kernel",
            sizes_known=state.guesses is None,
        )
        return self._with_views(state, decisions, placed)

    def _with_views(
        self, state: State, decisions: Mapping[fx.Node, Decision], placed: dict[fx.Node, Placement]
    ) -> dict[fx.Node, Placement]:
        if self.policy.weights == "cast":
            return placed
        return lower_views(state.graph, decisions, placed, state.parameters, self.policy.ports)

    def _moved(self, state: State, units: Units, placements: Mapping[fx.Node, Placement]) -> int:
        weights, keeps = self._uncast(state, placements), self.policy.keep_output_dtype
        return bytes_moved(state.graph, placements, units, keep_output_dtype=keeps, weights=weights)

    def _uncast(self, state: State, placements: Mapping[fx.Node, Placement]) -> frozenset[fx.Node]:
        """The parameters that are read low without a cast in each call."""
        if self.policy.weights == "cast":
            return frozenset()
        found = [n for n in state.graph.nodes if n.op == "get_attr" and n.target in state.parameters]
        found = [n for n in found if n not in state.classification.wide]  # their casts saturate
        if self.policy.weights == "low":
            reads = LowReads(placements, self.policy.ports)
            mixed = {state.numbers[str(n.target)] for n in found if not reads.all_of(n)}
            found = [n for n in found if state.numbers[str(n.target)] not in mixed]
        return frozenset(found)
