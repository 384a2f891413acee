"""Finds the nodes that run in float32 because an op that they lead to cannot use a rounded operand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from autocastfx.errors import Place
from autocastfx.graph.alias import AliasSet, alias_sets
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import Use, argument, has_float32, is_member, uses
from autocastfx.passes.analysis.cancellations import is_size
from autocastfx.passes.analysis.ports import Ports
from autocastfx.plan.plan import NO_SOURCE, Decision, Forced
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category, Demand

__all__ = ["Demands"]

_FREE = (Category.INFER, Category.CLEAR, Category.PROMOTE)
_ANY = (*_FREE, Category.ALLOW)


@dataclass(frozen=True)
class _Wish:
    """A value is not to be rounded.

    Attributes:
        by: name of the node that asks.
        reason: why.
        source: the list's line, or the rule that no list overrides.
        through_products: asked of products of values, too.
        forces: the categories in which the node that asks runs in float32 itself.
    """

    by: str
    reason: str
    source: Place | Forced
    through_products: bool = False
    forces: tuple[Category, ...] = ()


@dataclass(frozen=True)
class Demands:
    """The demands of one conversion.

    Attributes:
        ports: which inputs a node shares its precision with, and the list that holds the demands.
        parameters: ``get_attr`` targets; a product with one of them is a layer, and keeps its precision.
        cancelling: nodes in which large values cancel, with the reason.
    """

    ports: Ports
    parameters: frozenset[str]
    cancelling: Mapping[fx.Node, str] = field(default_factory=dict[fx.Node, str])

    def __call__(self, graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> dict[fx.Node, Decision]:
        """``decisions``, in which the ops that demand, and the free ones that lead to them, run in float32.

        Args:
            graph: captured, with abstract values.
            decisions: one for every computing node.
        """
        found = dict(decisions)
        storages = alias_sets(graph, self.ports.written)
        wishes: dict[fx.Node, _Wish] = {}
        for node in reversed(graph.nodes):
            reads = [u for u in uses(node) if has_float32(u.node)]
            if node not in decisions or not (reads or has_float32(node)):
                continue
            decision, storage = decisions[node], storages.get(node)
            asked = wishes.get(_written_with(node, storages)) if storage is None or not _is_state(storage) else None
            own, demanded = self._own(node, decision, reads, storages)
            if own is not None and decision.category in own.forces:
                found[node] = Decision(Category.DENY, own.reason, own.source)
            elif own is None and asked is not None and decision.category is not Category.DENY:
                if not self._may_obey(node, decision, asked, found):
                    continue
                found[node] = Decision(Category.DENY, f"leads to {asked.by}: {asked.reason}", asked.source)
            is_stronger = asked is not None and (own is None or asked.through_products)
            for read in reads if is_stronger else demanded:
                wish = asked if is_stronger else own
                value = _written_with(read.node, storages)
                if wish is not None and (value not in wishes or wish.through_products):
                    wishes[value] = wish
        return found | dict(self._after(graph, found))

    def _own(
        self, node: fx.Node, decision: Decision, reads: list[Use], storages: Mapping[fx.Node, AliasSet]
    ) -> tuple[_Wish | None, list[Use]]:
        """The wish of ``node`` itself, and the reads that it is for; None if it has no wish."""
        storage = storages.get(node)
        if storage is not None and _is_state(storage) and self.ports.written(node):
            reason = f"it computes the next contents of {storage.root.name}"
            wish = _Wish(node.name, reason, Forced.UPDATE, through_products=True)
            return wish, [u for u in reads if u.node not in storage.members]
        if decision.source is Forced.EPSILON:  # a bound or an epsilon has no use beside an operand that was rounded
            return _Wish(node.name, decision.reason, Forced.EPSILON), reads
        demand = self.ports.op_list.demand(op_name(node))
        divisor = self._divisor(node)
        if demand is None and divisor is not None:
            demand = self.ports.op_list.demand("div")
        rule = self.ports.op_list.rule(op_name(node), self.ports.device)
        is_a_persons = rule is not None and not rule.shipped and rule.category in _FREE
        is_allowed = rule is not None and not rule.shipped and rule.category is Category.ALLOW
        if node in self.cancelling and not (is_a_persons or is_allowed):
            return _Wish(node.name, self.cancelling[node], Forced.DISTANCE, through_products=True, forces=_ANY), reads
        if demand is None or (demand.shipped and (is_a_persons or (is_allowed and divisor is not None))):
            return None, []
        at = [u.node for u in reads if u.argument in (demand.at or demand.arguments or (u.argument,))]
        at = at if divisor is None else [divisor]
        if demand.of and not any(_is_made_by(value, demand.of, self.ports.op_list) for value in at):
            return None, []
        through = demand.through in ("products", "both")
        wish = _Wish(node.name, demand.reason, demand.source or NO_SOURCE, through, _FREE if divisor is None else _ANY)
        named = demand.arguments if divisor is None else ()
        demanded = [u for u in reads if u.argument in (named or (u.argument,))]
        return (wish, demanded) if demanded else (None, [])

    def _divisor(self, node: fx.Node) -> fx.Node | None:
        """What a product divides by: ``b`` of ``a * (1 / b)``, and of ``einsum("nm,mk,n->nk", a, c, 1 / b)``."""
        made_by = [u.node for u in uses(node) if has_float32(u.node)]
        is_mul = base_name(op_name(node)) == "mul" and len(made_by) == 2
        if not is_mul and not self._multiplies_values(node):
            return None
        return next((found for read in made_by if (found := _inverted(read, self.ports.op_list)) is not None), None)

    def _may_obey(self, node: fx.Node, decision: Decision, wish: _Wish, found: Mapping[fx.Node, Decision]) -> bool:
        if decision.category in _FREE:
            return wish.through_products or not _serves(node, found)
        return wish.through_products and decision.category is Category.ALLOW and self._multiplies_values(node)

    def _multiplies_values(self, node: fx.Node) -> bool:
        """True for a product of computed values; false for a layer, which multiplies by a parameter, and for a sum."""
        kind = self.ports.facts.reduces.get(base_name(op_name(node)))
        if kind in (None, "elements"):
            return False
        return not any(_is_parameter(u.node, self.parameters, self.ports.op_list) for u in uses(node))

    def _after(self, graph: fx.Graph, found: Mapping[fx.Node, Decision]) -> Iterator[tuple[fx.Node, Decision]]:
        """The products that read the result of an op whose demand goes both ways."""
        made: dict[fx.Node, Demand] = {}
        for node in (n for n in graph.nodes if n in found and has_float32(n)):
            demand, before = (
                self.ports.op_list.demand(op_name(node)),
                [made[r] for r in node.all_input_nodes if r in made],
            )
            if demand is not None and demand.through == "both":
                made[node] = demand
            elif before and (found[node].category in _FREE or is_member(node)):
                made[node] = before[0]
            elif before and found[node].category is Category.ALLOW and self._multiplies_values(node):
                yield node, Decision(Category.DENY, f"follows it: {before[0].reason}", before[0].source or NO_SOURCE)


def _is_state(storage: AliasSet) -> bool:
    """True if what is written into ``storage`` outlives the call: in a buffer, a parameter or an input."""
    return storage.root.op in ("placeholder", "get_attr")


def _written_with(node: fx.Node, storages: Mapping[fx.Node, AliasSet]) -> fx.Node:
    """The value that ``node`` is, or is a part or an earlier state of: what is written into one reaches the others."""
    return storages[node].root if node in storages else node


def _serves(node: fx.Node, found: Mapping[fx.Node, Decision]) -> bool:
    """True if an ``allow`` op reads ``node``, or a view of it, in 16 bits."""
    for reader in node.users:
        category = found[reader].category if reader in found else None
        if category is Category.ALLOW or (category is Category.CLEAR and _serves(reader, found)):
            return True
    return False


def _is_made_by(value: fx.Node, ops: tuple[str, ...], op_list: OpList) -> bool:
    """True if one of ``ops`` makes ``value``, or something that it is a view, a bound or a scaled version of."""
    while value.op == "call_function":
        if base_name(op_name(value)) in ops:
            return True
        rule = op_list.rule(op_name(value))
        reads = [u.node for u in uses(value) if has_float32(u.node)]
        if rule is None or rule.category not in (Category.CLEAR, Category.INFER) or len(reads) != 1:
            return False
        value = reads[0]
    return False


def _inverted(value: fx.Node, op_list: OpList) -> fx.Node | None:
    """The value whose inverse ``value`` is a view or a multiple of; None if there is none."""
    while value.op == "call_function":
        name = base_name(op_name(value))
        reads = [u for u in uses(value) if has_float32(u.node) and not is_size(u, name)]
        if len(reads) != 1:
            return None
        if name == "reciprocal" or (name in ("div", "true_divide") and reads[0].argument == "other"):
            return reads[0].node
        if name == "pow" and argument(value, "exponent") == -1:
            return reads[0].node
        rule = op_list.rule(op_name(value))
        if name not in ("mul", "neg") and (rule is None or rule.category is not Category.CLEAR):
            return None
        value = reads[0].node
    return None


def _is_parameter(value: fx.Node, parameters: frozenset[str], op_list: OpList) -> bool:
    """True for a parameter and for views of it."""
    while value.op == "call_function":
        rule = op_list.rule(op_name(value))
        if rule is None or rule.category is not Category.CLEAR or len(value.all_input_nodes) != 1:
            return False
        value = value.all_input_nodes[0]
    return value.op == "get_attr" and str(value.target) in parameters
