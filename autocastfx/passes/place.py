"""Chooses the precision that every node runs in and is stored in. Pure: no edge is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autocastfx.graph.alias import reachable
from autocastfx.graph.node import has_float32, producer, tensors, uses
from autocastfx.passes.analysis.min_cut import Term
from autocastfx.passes.analysis.node_errors import equal_terms, product_terms
from autocastfx.passes.analysis.place_cheaply import Folding, bytes_moved, is_read_low, lower_views, place_cheaply
from autocastfx.passes.analysis.units import Unit, Units, units_of
from autocastfx.passes.decide.checks import RANGE
from autocastfx.passes.state import Classification, Pass, State
from autocastfx.plan.plan import Cause, Decision, Forced, Placement, Precision, Traffic, Why
from autocastfx.policy.rule import Category

# decisions → placements by TensorFlow's rule (auto_mixed_precision): grow the deny set forwards, then the allow set
# between allows, then through clear ops. Pure: no edge is touched, no other pass is known.
#
# What the cut is compared with, and what a list gets that says ``placement: simple``.


def place_simply(decisions: Mapping[fx.Node, Decision], units: Units) -> dict[fx.Node, Placement]:
    """A placement for each computing node.

    Args:
        decisions: one for every ``call_*`` node.
        units: of the same graph and decisions.
    """
    tainted: dict[Unit, Cause] = {}
    while True:
        _taint(units, tainted)
        low = _grow(units, tainted)
        promote = [u for u in low if u.category is Category.PROMOTE]
        widest = {u: Cause(Why.INPUT_IS_FLOAT32) for u in promote if not _all_low(u, units, low)}
        if not widest:
            break
        tainted.update(widest)
    for unit in units:
        reads = [u.node for n in unit.nodes for u in uses(n) if has_float32(u.node)]
        if unit.is_free and not any(has_float32(n) for n in unit.nodes) and all(units.stored(r) in low for r in reads):
            low.setdefault(unit, Cause(Why.ALL_LOW))
    return units.placements(decisions, low, {u: _because(u, tainted) for u in units if u not in low})


def _because(unit: Unit, tainted: Mapping[Unit, Cause]) -> Cause:
    if unit in tainted and not unit.category.is_float32:
        return tainted[unit]
    return Cause(Why.NOT_ENCLOSED if unit.is_free else Why(unit.category.value))


def _taint(units: Units, tainted: dict[Unit, Cause]) -> None:
    """Add what must be float32 because a deny op comes before it; ``tainted`` holds each unit's reason."""
    starts = [u for u in units if u.category.taints or u in tainted]
    because = {u: tainted.get(u, Cause(Why.AFTER, (u.name,))) for u in starts}
    reached = reachable(starts, lambda u: (v for v in u.after if v.is_free))
    ends = [u for u in units if u.category.is_float32 or u.category in (Category.INFER, Category.PROMOTE)]
    leads_on = reachable(ends, lambda u: (v for v in u.before if v.category is Category.CLEAR))
    for unit, start in reached.items():
        if unit.category in (Category.INFER, Category.PROMOTE) or (
            unit.category is Category.CLEAR and unit in leads_on
        ):
            tainted.setdefault(unit, because[start])


def _grow(units: Units, tainted: Mapping[Unit, Cause]) -> dict[Unit, Cause]:
    """The units that run low, each with its reason: allow ops, what lies between them, and clear ops next to those."""

    def is_open(unit: Unit) -> bool:
        return unit.is_free and unit not in tainted

    allow = [u for u in units if u.category.is_low]
    after = reachable([u for u in allow if u.category.leads], lambda u: filter(is_open, u.after))
    before = reachable(allow, lambda u: filter(is_open, u.before))
    low = {u: Cause(Why(u.category.value)) for u in allow}
    low.update({u: Cause(Why.BETWEEN, (after[u].name, before[u].name)) for u in after if u in before and u not in low})
    near = reachable(low, lambda u: (v for v in (*u.before, *u.after) if is_open(v) and v.category is Category.CLEAR))
    low.update({u: Cause(Why.NEXT_TO, (start.name,)) for u, start in near.items() if u not in low})
    return low


def _all_low(unit: Unit, units: Units, low: Mapping[Unit, Cause]) -> bool:
    """True if every floating input is low already; a 0-d tensor never widens a result."""
    for node in unit.nodes:
        for read in (u.node for u in uses(node) if has_float32(u.node)):
            source = units.of.get(producer(read))
            if source is unit or (source is not None and source in low):
                continue
            if any(t.ndim for t in tensors(read)):
                return False
    return True


class Placer(Pass):
    """Places by the cut, or by TensorFlow's rule for a list that asks for it, and then as an edited plan says."""

    name = "place"
    rewrites = False

    def __call__(self, state: State) -> State:
        """The state with placements and the bytes that they move.

        Raises:
            PlanError: the edited plan asks for what cannot be.
        """
        settings, state = self.settings, self._without_overflows(state)
        classification = state.classification
        units = units_of(state.graph, classification.decisions, settings.ports)
        simple = self._with_views(state, classification.decisions, place_simply(classification.decisions, units))
        is_priced = settings.prices is not None and settings.prices.per_error is not None
        is_simple = settings.op_list.placement == "simple" and not is_priced
        placements = simple if is_simple else self._cheaply(state, units)
        if settings.plan is not None:
            obeyed = settings.plan.obey(classification.decisions, placements, classification.unable, state.prefix)
            state = replace(state, classification=replace(classification, decisions=obeyed.pinned))
            units = units_of(state.graph, obeyed.pinned, settings.ports)
            decisions, placements = obeyed.result(self._cheaply(state, units))
            state = replace(state, classification=replace(classification, decisions=decisions))
        traffic = Traffic(self._moved(state, units, placements), self._moved(state, units, simple))
        return replace(state, placements=placements, traffic=traffic)

    def _cheaply(self, state: State, units: Units) -> dict[fx.Node, Placement]:
        settings, decisions = self.settings, state.classification.decisions
        measured, priced = self._measured(state, units)
        folding = Folding(settings.ports, settings.fold, settings.low_name)
        placed = place_cheaply(
            *(state.graph, decisions, units),
            folds=folding(state.graph, decisions, state.classification.wide),
            keep_output_dtype=settings.keep_output_dtype,
            parameters=state.parameters,
            rounds=settings.fold == "kernel",
            measured=measured,
            priced=priced,
            readers_of=self.settings.readers(state.graph, decisions, lambda n: decisions[n].category.may_be_low),
        )
        return self._with_views(state, decisions, placed)

    def _without_overflows(self, state: State) -> State:
        """The state with a decision for float32 on each node whose measured values are beyond the dtype's range."""
        prices, classification = self.settings.prices, state.classification
        if prices is None or prices.per_error is None:
            return state
        reason = f"a measured value is beyond {self.settings.low_name}'s range"
        decisions = {
            node: Decision(Category.DENY, reason, RANGE)
            for node, effect in state.errors.effects.items()
            if effect.overflows and node in classification.decisions and not self._is_hard(node, classification)
        }
        return replace(
            state, classification=replace(classification, decisions={**classification.decisions, **decisions})
        )

    def _measured(self, state: State, units: Units) -> tuple[frozenset[fx.Node], list[Term]]:
        """The nodes that errors and bytes place, for no hard rule and no person decides them; and what errors cost."""
        prices, classification, errors = self.settings.prices, state.classification, state.errors
        if prices is None or prices.per_error is None:
            return frozenset(), []
        known = (
            node for node, effect in errors.effects.items() if effect.computes and node in classification.decisions
        )
        measured = frozenset(node for node in known if not self._is_hard(node, classification))
        alone = [unit for unit in units if len(unit.nodes) == 1 and unit.nodes[0] in measured]
        return measured, [
            *errors.terms(units, prices.per_error),
            *equal_terms(alone),
            *product_terms(units, self.settings.facts.reduces, prices.bytes_per_flop),
        ]

    def _is_hard(self, node: fx.Node, classification: Classification) -> bool:
        decision, rule = classification.decisions[node], self.settings.matcher(node)
        is_open = decision.category in (Category.ALLOW, Category.DENY, Category.INFER, Category.CLEAR)
        is_persons = rule is not None and not rule.shipped
        special = node in classification.wide or node in classification.unable or node in classification.fills
        meets_wide = not classification.wide.isdisjoint(node.all_input_nodes)
        return not is_open or isinstance(decision.source, Forced) or is_persons or special or meets_wide

    def _with_views(
        self, state: State, decisions: Mapping[fx.Node, Decision], placed: dict[fx.Node, Placement]
    ) -> dict[fx.Node, Placement]:
        if self.settings.weights == "cast":
            return placed
        return lower_views(state.graph, decisions, placed, state.parameters, self.settings.ports)

    def _moved(self, state: State, units: Units, placements: Mapping[fx.Node, Placement]) -> int:
        weights, keeps = self._uncast(state, placements), self.settings.keep_output_dtype
        decisions, low = state.classification.decisions, Precision.LOW
        readers = self.settings.readers(state.graph, decisions, lambda node: placements[node].run is low)
        of = state.graph, placements, units
        return bytes_moved(*of, keep_output_dtype=keeps, weights=weights, readers_of=readers)

    def _uncast(self, state: State, placements: Mapping[fx.Node, Placement]) -> frozenset[fx.Node]:
        """The parameters that are read low without a cast in each call."""
        if self.settings.weights == "cast":
            return frozenset()
        parameters = [n for n in state.graph.nodes if n.op == "get_attr" and n.target in state.parameters]
        parameters = [n for n in parameters if n not in state.classification.wide]  # their casts saturate
        if self.settings.weights == "low":
            ports, ids = self.settings.ports, state.parameter_ids
            mixed = {ids[str(n.target)] for n in parameters if not is_read_low(n, placements, ports)}
            parameters = [n for n in parameters if ids[str(n.target)] not in mixed]
        return frozenset(parameters)
