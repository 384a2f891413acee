"""Measured effects of 16 bits on the nodes of a graph: terms of a cut, and the predicted error of a placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import all_names, elements, example, is_float32, module_path, producer, uses
from autocastfx.graph.sizes import product
from autocastfx.graph.walk import Key, key_of
from autocastfx.passes.analysis.min_cut import OUTSIDE, Term
from autocastfx.passes.analysis.units import Unit, Units
from autocastfx.plan.plan import Placement, PlannedFloat8, Precision, ProductError, Recomposed
from autocastfx.plan.sensitivity import OUTPUT, Effect, Signature, added, rms
from autocastfx.policy.float8 import Product


@dataclass(frozen=True)
class NodeEffectMap:
    """The effects of the nodes of a graph.

    Attributes:
        effects: by node; that of the graph's output holds what comes back from there.
        prefix: of the names, in a sub-graph.
        outer: for the inputs of a sub-graph, the names of the values outside.
    """

    effects: Mapping[fx.Node, Effect]
    prefix: str = ""
    outer: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        known: Mapping[Key, Effect],
        prefix: str = "",
        outer: Mapping[str, tuple[str, ...]] | None = None,
    ) -> NodeEffectMap:
        """Find the effects of the nodes of a captured graph.

        Args:
            graph: captured.
            known: effects by key.
            prefix: as above.
            outer: as above.
        """
        effects = {node: known[key] for node in graph.nodes if (key := key_of(node, prefix)) in known}
        output = known.get((OUTPUT, OUTPUT, ""))
        if output is not None and not prefix:
            effects[graph.output_node()] = output
        return cls(effects, prefix, outer or {})

    def names(self, node: fx.Node) -> tuple[str, ...]:
        """The names that effects have for a value."""
        return self.outer.get(node.name) or tuple(self.prefix + name for name in all_names(node))

    def after(self, graph: fx.Graph, recomposed: Iterable[Recomposed]) -> NodeEffectMap:
        """The effects after nodes of the graph were replaced.

        A node that stands for several rounds what it reads as they do, and what it gives as the last of them does.
        """
        prefix = self.prefix
        by_name = {prefix + node.name: effect for node, effect in self.effects.items()}
        effects, made = dict(self.effects), {node.name: node for node in graph.nodes}
        for one in recomposed:
            parts = [by_name[name] for n in one.replaced if (name := prefix + n) in by_name]
            node = made.get(one.node)
            if node is None or node in effects or not parts or parts[-1].name != prefix + one.replaced[-1]:
                continue
            inside = {prefix + n for n in one.replaced}
            effects[node] = replace(
                parts[-1],
                reads=_outside([part.reads for part in parts], inside),
                returns=_outside([part.returns for part in parts], inside),
                overflows=any(part.overflows for part in parts),
            )
        here = set(graph.nodes)
        return replace(self, effects={n: e for n, e in effects.items() if n in here})

    def terms(self, units: Units, per_error: float) -> Iterator[Term]:
        """Yield the squared errors, in bytes, as terms of a cut. They are added up as if independent.

        Args:
            units: of the graph.
            per_error: the bytes that a squared relative error of 1 costs.
        """
        for node, effect in self.effects.items():
            unit = units.of.get(node)
            if unit is not None:
                yield Term(_bytes(effect.computes, per_error), (unit,), ())
            for read in dict.fromkeys(use.node for use in uses(node) if is_float32(use.node)):
                stored, names = units.stored(read) or OUTSIDE, self.names(read)
                if unit is not None and stored is not unit:
                    yield Term(_bytes(_known_by(names, effect.reads), per_error), (unit,), (stored,))
                if stored is not OUTSIDE and stored is not unit:
                    yield Term(_bytes(_known_by(names, effect.returns), per_error), (stored,), (unit or OUTSIDE,))

    def of_nodes(self, placements: Mapping[fx.Node, Placement]) -> dict[fx.Node, Signature]:
        """The effect of each node as it is placed, for those that have one."""
        signatures: dict[fx.Node, Signature] = {}
        for node, effect in self.effects.items():
            parts = list(self._parts(node, effect, placements))
            if parts:
                signatures[node] = added(parts)
        return signatures

    def with_errors(self, node: fx.Node, planned: PlannedFloat8, recipe: str) -> PlannedFloat8:
        """Add what was measured by ``recipe`` to what is planned for the products of a node."""
        effect = self.effects.get(node)
        known = effect.products if effect is not None and planned.recipe == recipe else {}
        return replace(planned, errors=tuple(ProductError(Product(name), rms(known[name])) for name in known))

    def of_products(self, node: fx.Node, planned: PlannedFloat8) -> Signature:
        """The effect of the products of a node that run in float8, by ``planned`` with its errors; empty: none."""
        measured = [one.product for one in planned.errors if one.product in planned.products]
        return added(self.effects[node].products[product.value] for product in measured)

    def _parts(self, node: fx.Node, effect: Effect, placements: Mapping[fx.Node, Placement]) -> Iterator[Signature]:
        placement = placements.get(node)
        is_low = placement is not None and placement.run is Precision.LOW
        if is_low and effect.computes:
            yield effect.computes
        as_stored = placement.as_stored if placement is not None else ()
        for use in {use.node: use for use in uses(node) if is_float32(use.node)}.values():
            made_by = placements.get(producer(use.node))
            stored_low = made_by is not None and made_by.store is Precision.LOW
            signature: Signature = ()
            if is_low and not stored_low and use.argument not in as_stored:
                signature = _known_by(self.names(use.node), effect.reads)
            elif not is_low and stored_low:
                signature = _known_by(self.names(use.node), effect.returns)
            if signature:
                yield signature


def _known_by(names: Iterable[str], signatures: Mapping[str, Signature]) -> Signature:
    """Return the effect on a value of several names: equal values that became one are rounded at once."""
    return added([signature for name in names if (signature := signatures.get(name))])


def _outside(mappings: Sequence[Mapping[str, Signature]], inside: set[str]) -> dict[str, Signature]:
    names = dict.fromkeys(name for mapping in mappings for name in mapping if name not in inside)
    return {name: added([mapping[name] for mapping in mappings if mapping.get(name)]) for name in names}


def _bytes(signature: Signature, per_error: float) -> int:
    return round(per_error * rms(signature) ** 2)


def equal_terms(units: Iterable[Unit]) -> Iterator[Term]:
    """Yield the terms by which units of the same module and op take one precision, so that a rule can say it."""
    first: dict[tuple[str, str], Unit] = {}
    for unit in units:
        node = unit.nodes[0]
        other = first.setdefault((module_path(node), base_name(op_name(node))), unit)
        if other is not unit:
            yield Term(None, (unit,), (other,))
            yield Term(None, (other,), (unit,))


def product_terms(units: Units, kinds: Mapping[str, str], bytes_per_flop: float) -> Iterator[Term]:
    """Yield what float32 products take longer, in bytes. ``kinds`` says where an op's depth is found."""
    for node, unit in units.of.items():
        kind = kinds.get(base_name(op_name(node)))
        sizes = product(node, kind, example) if kind not in (None, "elements") else None
        if sizes is not None:
            yield Term(round(bytes_per_flop * 2 * sizes.depth * elements(node)), (), (unit,))
