"""Finds the nodes that run in float32 because an op that they lead to cannot use a rounded operand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import cast

from torch import fx

from autocastfx.errors import TextPlace
from autocastfx.graph.alias import AliasSet, alias_sets, aliased, reachable
from autocastfx.graph.magnitude import Magnitude
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import STORED, Use, argument, constants, has_float32, is_member, tensors, uses
from autocastfx.passes.analysis.exact_numbers import SCALES, HeldValues, is_second_power
from autocastfx.passes.analysis.units import Ports, behind_moves, is_size, listed_category, only_moves
from autocastfx.plan.plan import CANCELLATION, EPSILON, NO_SOURCE, Decision, Forced, forced_by_numbers
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category, Demand, Rule


@dataclass(frozen=True)
class Demands:
    """The demands of one conversion.

    Attributes:
        ports: which inputs a node shares its precision with, and the list that holds the demands.
        parameters: ``get_attr`` targets; a product with one of them is a layer, and keeps its precision.
        cancelling: nodes in which large values cancel, with the reason.
        offsets: likewise, of values and a parameter; products before them are no more exact than torch.autocast's.
    """

    ports: Ports
    parameters: frozenset[str]
    cancelling: Mapping[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    offsets: Mapping[fx.Node, str] = field(default_factory=dict[fx.Node, str])

    def __call__(self, graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> dict[fx.Node, Decision]:
        """``decisions``, in which the ops that demand, and the free ones that lead to them, run in float32.

        Args:
            graph: captured, with abstract values.
            decisions: one for every computing node.
        """
        new_decisions = dict(decisions)
        storages = alias_sets(graph, self.ports.written)
        wishes = _stored(graph, storages)
        for node in reversed(graph.nodes):
            reads = [u for u in uses(node) if has_float32(u.node)]
            if node not in decisions or not (reads or has_float32(node)):
                continue
            decision, storage = decisions[node], storages.get(node)
            asked = wishes.get(_written_with(node, storages)) if storage is None or not _is_state(storage) else None
            own, demanded = self._own(node, decision, reads, storages)
            if own is not None and decision.category in own.forces:
                new_decisions[node] = Decision(Category.DENY, own.reason, own.source)
            elif own is None and asked is not None and decision.category is not Category.DENY:
                if not self._may_obey(node, decision, asked, new_decisions):
                    continue
                new_decisions[node] = Decision(Category.DENY, f"leads to {asked.by}: {asked.reason}", asked.source)
            is_stronger = asked is not None and (own is None or asked.through_products)
            for read in reads if is_stronger else demanded:
                wish = asked if is_stronger else own
                value = _written_with(read.node, storages)
                if wish is not None and (value not in wishes or wish.through_products):
                    wishes[value] = wish
        return new_decisions | dict(self._after(graph, new_decisions))

    def _own(
        self, node: fx.Node, decision: Decision, reads: list[Use], storages: Mapping[fx.Node, AliasSet]
    ) -> tuple[_Wish | None, list[Use]]:
        """The wish of ``node`` itself, and the reads that it is for; None if it has no wish."""
        storage = storages.get(node)
        if storage is not None and _is_state(storage) and self.ports.written(node):
            reason = f"it computes the next contents of {storage.root.name}"
            wish = _Wish(node.name, reason, UPDATE, through_products=True)
            return wish, [u for u in reads if u.node not in storage.members]
        if decision.source == EPSILON:  # a bound or an epsilon has no use beside an operand that was rounded
            return _Wish(node.name, decision.reason, EPSILON), reads
        demand = self.ports.op_list.demand(op_name(node))
        divisor = self._divisor(node)
        if demand is None and divisor is not None:
            demand = self.ports.op_list.demand("div")
        rule = self.ports.op_list.rule(op_name(node), self.ports.device)
        is_a_persons = rule is not None and not rule.shipped and rule.category.is_free
        is_allowed = rule is not None and not rule.shipped and rule.category.is_low
        if (cancels := self.cancelling.get(node, self.offsets.get(node))) and not (is_a_persons or is_allowed):
            return _Wish(node.name, cancels, CANCELLATION, node in self.cancelling, _ANY), reads
        if demand is None or (demand.shipped and (is_a_persons or (is_allowed and divisor is not None))):
            return None, []
        effect = demand.effect
        at = [u.node for u in reads if u.argument in (effect.at or effect.arguments or (u.argument,))]
        at = at if divisor is None else [divisor]
        if effect.of and not any(_is_made_by(value, effect.of, self.ports.op_list) for value in at):
            return None, []
        through = effect.through in ("products", "both")
        wish = _Wish(node.name, demand.reason, demand.source or NO_SOURCE, through, _FREE if divisor is None else _ANY)
        named = effect.arguments if divisor is None else ()
        demanded = [u for u in reads if u.argument in (named or (u.argument,))]
        return (wish, demanded) if demanded else (None, [])

    def _divisor(self, node: fx.Node) -> fx.Node | None:
        """What a product divides by: ``b`` of ``a * (1 / b)``, and of ``einsum("nm,mk,n->nk", a, c, 1 / b)``."""
        made_by = [u.node for u in uses(node) if has_float32(u.node)]
        is_mul = base_name(op_name(node)) == "mul" and len(made_by) == 2
        if not is_mul and not self._multiplies_values(node):
            return None
        return next((divisor for read in made_by if (divisor := _inverted(read, self.ports.op_list)) is not None), None)

    def _may_obey(self, node: fx.Node, decision: Decision, wish: _Wish, decisions: Mapping[fx.Node, Decision]) -> bool:
        if decision.category.is_free:
            return wish.through_products or not _serves(node, decisions)
        return wish.through_products and decision.category.is_low and self._multiplies_values(node)

    def _multiplies_values(self, node: fx.Node) -> bool:
        """True for a product of computed values; false for a layer, which multiplies by a parameter, and for a sum."""
        kind = self.ports.facts.reduces.get(base_name(op_name(node)))
        if kind in (None, "elements"):
            return False
        return not any(_is_parameter(u.node, self.parameters, self.ports.op_list) for u in uses(node))

    def _after(self, graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> Iterator[tuple[fx.Node, Decision]]:
        """The products that read the result of an op whose demand goes both ways."""
        made: dict[fx.Node, Rule[Demand]] = {}
        for node in (n for n in graph.nodes if n in decisions and has_float32(n)):
            demand = self.ports.op_list.demand(op_name(node))
            before = [made[r] for r in node.all_input_nodes if r in made]
            if demand is not None and demand.effect.through == "both":
                made[node] = demand
            elif before and (decisions[node].category.is_free or is_member(node)):
                made[node] = before[0]
            elif before and decisions[node].category.is_low and self._multiplies_values(node):
                yield node, Decision(Category.DENY, f"follows it: {before[0].reason}", before[0].source or NO_SOURCE)


# Small differences of large values: a variance as E[x²] - E[x]², a stencil, a value less its average.

_SUMS = ("add", "sub", "rsub")
_AVERAGES = ("mean", "nanmean", "sum", "nansum", "cumsum")
_POOLS = ("avg_pool", "adaptive_avg_pool")
_JOINED = {"split": "cat", "split_with_sizes": "cat", "chunk": "cat", "tensor_split": "cat", "unbind": "stack"}


def cancellations(graph: fx.Graph, values: HeldValues, op_list: OpList, facts: KernelFacts) -> dict[fx.Node, str]:
    """The nodes in which large values cancel, and what averages those values, each with the reason.

    Args:
        graph: captured, with abstract values.
        values: of constants and parameters: what is trained, whose rows add up to zero, and whose to one.
        op_list: names the ops that only move values.
        facts: which ops are products.
    """
    moments = _Moments(_fixed(graph, values.trained), op_list, facts)
    reasons = {
        node: f"shifted copies of {of.name} whose weights add up to zero: a difference of neighbours"
        for node, of in _stencils(graph, op_list)
    }
    for node in graph.nodes:
        name = base_name(op_name(node)) if node.op == "call_function" else ""
        if name in ("sub", "rsub"):
            reason = "a difference of an average of products and a product of averages is small beside both"
            reasons |= dict.fromkeys(moments.cancelling(node), reason)
            reason = "a difference of a value and its average is small beside both"
            reasons |= dict.fromkeys(moments.beside_average(node, values.averaging), reason)
        elif (weight := moments.weight(node)) is not None and str(weight.target) in values.balanced:
            reasons[node] = f"the weights of {weight.name} add up to zero: a difference of neighbours"
    return reasons


def offsets(
    graph: fx.Graph, parameters: Set[str], held: Mapping[str, Magnitude], measured: Mapping[fx.Node, Magnitude]
) -> dict[fx.Node, str]:
    """The sums with one of ``parameters`` that is far from 0, each with the reason. Its error is the same in all rows.

    It is far if it is larger than the sum, as ``measured``, or else than 1. Where nothing was measured, one that is
    subtracted counts as far, for it may learn to be.
    """
    reasons: dict[fx.Node, str] = {}
    for node in (n for n in graph.nodes if n.op == "call_function" and base_name(op_name(n)) in _SUMS):
        reads = [u.node for u in uses(node) if has_float32(u.node)]
        names = [str(n.target) for n in reachable(reads, aliased) if n.op == "get_attr" and n.target in parameters]
        if len(reads) != 2 or len(names) != 1:
            continue
        adds = base_name(op_name(node)) == "add" and dict(constants(node)).get("alpha", 1) > 0
        is_far = names[0] in held and held[names[0]].rms > (measured[node].rms if node in measured else 1.0)
        if is_far or not (adds or node in measured):
            reasons[node] = f"a sum with {names[0]}, which is far from 0 or may learn to be, is small beside it"
    return reasons


@dataclass(frozen=True)
class _Weight:
    """How often a sum has a value, and the sum of its factors and of their magnitudes."""

    count: int = 0
    total: float = 0.0
    size: float = 0.0

    @property
    def cancels(self) -> bool:
        """True for a second difference; a first one, of two like 16-bit values, is exact."""
        return self.count > 2 and abs(self.total) <= 1e-6 * self.size


def _stencils(graph: fx.Graph, op_list: OpList) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The sums in which the shifted copies of one value cancel, each with the value."""
    sums: dict[fx.Node, dict[fx.Node, _Weight]] = {}
    for node in (n for n in graph.nodes if has_float32(n)):
        reads = [u.node for u in uses(node) if u.node in sums]
        factors = _factors(node, len(reads), op_list)
        weights: dict[fx.Node, _Weight] = {} if factors else {node: _Weight(1, 1.0, 1.0)}
        for read, factor in zip(reads, factors, strict=False):
            for of, w in sums[read].items():
                had = weights.get(of, _Weight())
                weights[of] = _Weight(
                    had.count + w.count, had.total + w.total * factor, had.size + w.size * abs(factor)
                )
        if base_name(op_name(node)) in _SUMS:
            cancelled = {of for read in reads for of, w in sums[read].items() if w.cancels}
            yield from ((node, of) for of, w in weights.items() if w.cancels and of not in cancelled)
        sums[node] = weights


def _factors(node: fx.Node, reads: int, op_list: OpList) -> tuple[float, ...]:
    """Return the factors by which a sum, a move or a scaling multiplies its values; nothing for other nodes."""
    name = base_name(op_name(node)) if node.op == "call_function" else ""
    numbers = dict(constants(node))
    if name in _SUMS and "alpha" not in numbers:
        return {"add": (1.0, 1.0), "sub": (1.0, -1.0), "rsub": (-1.0, 1.0)}[name][:reads]
    if reads != 1 or is_member(node):
        return ()
    if name in ("mul", "div") and (number := numbers.get("other")):
        return (number if name == "mul" else 1 / number,)
    if name == "neg":
        return (-1.0,)
    return (1.0,) if only_moves(node, op_list) else ()


def _fixed(graph: fx.Graph, trained: Set[str]) -> frozenset[fx.Node]:
    """The values that depend on no input and on nothing that is trained."""
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            fixed.update([node] if str(node.target) not in trained else [])
        elif node.op == "call_function" and not [r for r in node.all_input_nodes if has_float32(r) and r not in fixed]:
            fixed.add(node)
    return frozenset(fixed)


@dataclass(frozen=True)
class _Term:
    """A term of a sum: a product of values, or an average of one.

    Attributes:
        of: the values multiplied, as they were before averaging.
        is_average: the product itself is averaged.
        averages: all nodes that average on the way.
    """

    of: frozenset[fx.Node]
    is_average: bool
    averages: frozenset[fx.Node]


@dataclass(frozen=True)
class _Moments:
    fixed: frozenset[fx.Node]
    op_list: OpList
    facts: KernelFacts

    def cancelling(self, node: fx.Node) -> set[fx.Node]:
        """``node`` and what averages its terms, if it takes products of averages from an average of such products."""
        terms = [term for each in self._terms(node) if (term := self._term(each)) is not None]
        pairs = [(a, b) for a in terms for b in terms if a is not b and a.is_average and a.of == b.of]
        return {node, *(each for pair in pairs for term in pair for each in term.averages)} if pairs else set()

    def beside_average(self, node: fx.Node, averaging: Set[str]) -> set[fx.Node]:
        """``node`` and the products that average, if it takes an average from the value itself, or from another one."""
        origins = [self._origin(term) for term in self._terms(node)]
        nodes: set[fx.Node] = set()
        for (of, one), (other_of, other) in itertools.combinations(origins, 2):
            products = set(one) ^ set(other)  # both may begin with the same averages
            weights = [self.weight(product) for product in products]
            if of is other_of and weights and all(w and str(w.target) in averaging for w in weights):
                nodes |= {node, *products}
        return nodes

    def weight(self, node: fx.Node) -> fx.Node | None:
        """The constant that a product multiplies values by, behind its views; None if there is none."""
        if node.op != "call_function" or not self._is_product(node):
            return None
        fixed = [u.node for u in uses(node) if u.node in self.fixed and has_float32(u.node) and u.argument != "bias"]
        if len(fixed) != 1 or self._read(node) is None:
            return None
        value = behind_moves(fixed[0], self.op_list)
        return value if value.op == "get_attr" else None

    def _terms(self, node: fx.Node) -> Iterator[fx.Node]:
        """The terms of a sum, through further sums."""

        def added(term: fx.Node) -> Iterator[fx.Node]:
            if base_name(op_name(term)) in _SUMS:
                yield from (u.node for u in uses(term) if has_float32(u.node))

        yield from (term for term in reachable([node], added) if term is not node)

    def _term(self, value: fx.Node) -> _Term | None:
        product, averages = self._origin(value)
        factors = self._factors(product)
        if not factors:
            return None
        origins = [self._origin(factor) for factor in factors]
        inside = {average for _, inner in origins for average in inner}
        return _Term(frozenset(origin for origin, _ in origins), bool(averages), frozenset({*averages, *inside}))

    def _factors(self, node: fx.Node) -> list[fx.Node]:
        name = base_name(op_name(node)) if node.op == "call_function" else ""
        reads = [u.node for u in uses(node) if has_float32(u.node) and u.node not in self.fixed]
        return reads if is_second_power(node) or (name == "mul" and len(reads) == 2) else []

    def _origin(self, value: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """The value that ``value`` is a view, a multiple or an average of, and the nodes that average."""
        averages: list[fx.Node] = []
        while True:
            if is_member(value):
                read, between = self._piece(value)
                averages += between
            else:
                read = self._read(value)
                if read is not None and not only_moves(value, self.op_list) and base_name(op_name(value)) not in SCALES:
                    averages.append(value)
            if read is None:
                return value, averages
            value = read

    def _piece(self, member: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
        """Of values that are joined, averaged and split again, the one in the place of ``member``; else None."""
        split = member.all_input_nodes[0]
        joins = _JOINED.get(base_name(op_name(split)))
        joined, averages = self._origin(cast("fx.Node", split.args[0])) if joins is not None else (split, [])
        if base_name(op_name(joined)) != joins or argument(split, "dim") != argument(joined, "dim"):
            return None, []
        parts = cast("Sequence[fx.Node]", joined.args[0])
        return (parts[cast("int", member.args[1])], averages) if len(parts) == len(tensors(split)) else (None, [])

    def _read(self, node: fx.Node) -> fx.Node | None:
        """The value of which ``node`` is a linear function that is known; None if it is none."""
        if node.op != "call_function":
            return None
        name = base_name(op_name(node))
        reads = [
            u.node for u in uses(node) if has_float32(u.node) and u.node not in self.fixed and not is_size(u, name)
        ]
        is_linear = name in (*SCALES, *_AVERAGES) or name.startswith(_POOLS) or self._is_product(node)
        return reads[0] if len(reads) == 1 and (is_linear or only_moves(node, self.op_list)) else None

    def _is_product(self, node: fx.Node) -> bool:
        return self.facts.reduces.get(base_name(op_name(node)), "elements") != "elements"


UPDATE = forced_by_numbers(
    "forced:update", "a buffer takes what is computed here, in float32: set run to low in an edited plan"
)
_FREE = tuple(category for category in Category if category.is_free)
_ANY = tuple(category for category in Category if category.may_be_low)


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
    source: TextPlace | Forced
    through_products: bool = False
    forces: tuple[Category, ...] = ()


def _stored(graph: fx.Graph, storages: Mapping[fx.Node, AliasSet]) -> dict[fx.Node, _Wish]:
    """The wishes for results that become the model's state when the graph has run."""
    output = graph.output_node()
    results = cast("Sequence[fx.Node]", output.args[0])
    return {
        _written_with(results[place], storages): _Wish(
            name, f"it computes the next contents of {name}", UPDATE, through_products=True
        )
        for place, name in output.meta.get(STORED, {}).items()
        if has_float32(results[place])
    }


def _is_state(storage: AliasSet) -> bool:
    """True if what is written into ``storage`` outlives the call: in a buffer, a parameter or an input."""
    return storage.root.op in ("placeholder", "get_attr")


def _written_with(node: fx.Node, storages: Mapping[fx.Node, AliasSet]) -> fx.Node:
    """The value that ``node`` is, or is a part or an earlier state of: what is written into one reaches the others."""
    return storages[node].root if node in storages else node


def _serves(node: fx.Node, decisions: Mapping[fx.Node, Decision]) -> bool:
    """True if an ``allow`` op reads ``node``, or a view of it, in 16 bits."""
    for reader in node.users:
        category = decisions[reader].category if reader in decisions else None
        if category is not None and (category.is_low or (category is Category.CLEAR and _serves(reader, decisions))):
            return True
    return False


def _is_made_by(value: fx.Node, ops: tuple[str, ...], op_list: OpList) -> bool:
    """True if one of ``ops`` makes ``value``, or something that it is a view, a bound or a scaled version of."""
    while value.op == "call_function":
        if base_name(op_name(value)) in ops:
            return True
        reads = [u.node for u in uses(value) if has_float32(u.node)]
        if listed_category(value, op_list) not in (Category.CLEAR, Category.INFER) or len(reads) != 1:
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
        if name not in ("mul", "neg") and not only_moves(value, op_list):
            return None
        value = reads[0].node
    return None


def _is_parameter(value: fx.Node, parameters: frozenset[str], op_list: OpList) -> bool:
    """True for a parameter and for views of it."""
    value = behind_moves(value, op_list)
    return value.op == "get_attr" and str(value.target) in parameters
