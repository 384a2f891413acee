"""Chooses the precision that every node runs in and is stored in. Pure: no edge is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autocastfx.passes.analysis.bytes_moved import bytes_moved
from autocastfx.passes.analysis.folding import Folding
from autocastfx.passes.analysis.low_reads import LowReads, lower_views
from autocastfx.passes.analysis.min_cut import Term
from autocastfx.passes.analysis.node_errors import equal_terms, product_terms
from autocastfx.passes.analysis.place_cheaply import place_cheaply
from autocastfx.passes.analysis.place_simply import place_simply
from autocastfx.passes.analysis.units import Units, units_of
from autocastfx.passes.state import Classification, Pass, State
from autocastfx.plan.plan import Decision, Forced, Placement, Traffic
from autocastfx.policy.rule import Category

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
        policy, state = self.policy, self._without_overflows(state)
        found = state.classification
        units = units_of(state.graph, found.decisions, policy.ports)
        simple = self._with_views(state, found.decisions, place_simply(found.decisions, units))
        is_priced = policy.prices is not None and policy.prices.per_error is not None
        is_simple = policy.op_list.placement == "simple" and not is_priced
        placements = simple if is_simple else self._cheaply(state, units)
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
        measured, priced = self._measured(state, units)
        folding = Folding(policy.ports, policy.fold, policy.low_name)
        placed = place_cheaply(
            *(state.graph, decisions, units),
            folds=folding(state.graph, decisions, state.classification.wide),
            keep_output_dtype=policy.keep_output_dtype,
            parameters=state.parameters,
            rounds=policy.fold == "kernel",
            sizes_known=state.guesses is None,
            measured=measured,
            priced=priced,
        )
        return self._with_views(state, decisions, placed)

    def _without_overflows(self, state: State) -> State:
        """The state with a decision for float32 on each node whose measured values are beyond the dtype's range."""
        prices, found = self.policy.prices, state.classification
        if prices is None or prices.per_error is None:
            return state
        reason = f"a measured value is beyond {self.policy.low_name}'s range"
        decisions = {
            node: Decision(Category.DENY, reason, Forced.RANGE)
            for node, effect in state.errors.effects.items()
            if effect.overflows and node in found.decisions and not self._is_hard(node, found)
        }
        return replace(state, classification=replace(found, decisions={**found.decisions, **decisions}))

    def _measured(self, state: State, units: Units) -> tuple[frozenset[fx.Node], list[Term]]:
        """The nodes that errors and bytes place, for no hard rule and no person decides them; and what errors cost."""
        prices, found, errors = self.policy.prices, state.classification, state.errors
        if prices is None or prices.per_error is None:
            return frozenset(), []
        known = (node for node, effect in errors.effects.items() if effect.computes and node in found.decisions)
        measured = frozenset(node for node in known if not self._is_hard(node, found))
        alone = [unit for unit in units if len(unit.nodes) == 1 and unit.nodes[0] in measured]
        return measured, [
            *errors.terms(units, prices.per_error),
            *equal_terms(alone),
            *product_terms(units, self.policy.facts.reduces, prices.bytes_per_flop),
        ]

    def _is_hard(self, node: fx.Node, found: Classification) -> bool:
        decision, rule = found.decisions[node], self.policy.matcher(node)
        is_open = decision.category in (Category.ALLOW, Category.DENY, Category.INFER, Category.CLEAR)
        is_persons = rule is not None and not rule.shipped
        special = node in found.wide or node in found.unable or node in found.fills
        meets_wide = not found.wide.isdisjoint(node.all_input_nodes)
        return not is_open or isinstance(decision.source, Forced) or is_persons or special or meets_wide

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
