"""decisions → the placements that move the fewest bytes: a minimum cut. Pure: no edge is touched, no pass is known.

What the categories leave free is labelled low or float32. ``allow`` and ``deny`` are given; an ``infer`` after a
``deny`` is float32 (TensorFlow's rule), and so is one that no ``allow`` comes before; a ``deny`` that folds may be low
between low neighbours. float32 stays float32 until an ``allow`` asks for less: an ``infer`` or a ``promote`` is low
only if its operands are (torch's own promotion), and so is a ``clear``, but for one that ``allow`` ops alone read. An
``infer`` that they alone read may cast a parameter. With ``rounds``, an ``infer`` may narrow what an ``allow`` led to,
never what came from outside. Ties are float32.

A node whose error was measured is free of these rules: bytes and errors choose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from torch import fx

from autocastfx.graph.alias import moves, reachable
from autocastfx.graph.node import elements, has_float32, is_float32, is_member, tensors, uses
from autocastfx.passes.analysis.folding import BYTES, CAST, Fold, Provenance, decisive
from autocastfx.passes.analysis.min_cut import OUTSIDE, Label, Term, cheapest
from autocastfx.passes.analysis.units import Unit, Units
from autocastfx.plan.plan import Cause, Decision, Placement, Precision, Why
from autocastfx.policy.rule import Category

__all__ = ["place_cheaply"]

_EXTRA = BYTES[Precision.FLOAT32] - BYTES[Precision.LOW]


_Readers = Mapping[Unit, tuple[Label, ...]]


@dataclass(frozen=True)
class _Taint:
    """The label of whether a ``deny`` that folds has tainted a unit; low if not."""

    unit: Unit


def place_cheaply(
    graph: fx.Graph,
    decisions: Mapping[fx.Node, Decision],
    units: Units,
    *,
    folds: Mapping[fx.Node, Fold] | None = None,
    keep_output_dtype: bool = True,
    parameters: frozenset[str] = frozenset(),
    rounds: bool = False,
    sizes_known: bool = True,
    measured: frozenset[fx.Node] = frozenset(),
    priced: Iterable[Term] = (),
) -> dict[fx.Node, Placement]:
    """A placement for each computing node of ``graph``.

    Args:
        graph: captured, with abstract values.
        decisions: one for every ``call_*`` node.
        units: of the same graph and decisions.
        folds: ``deny`` nodes that may run low between low neighbours, and ``promote`` nodes before them, with what each
            asks of its neighbours.
        keep_output_dtype: whether the graph's outputs are read in float32.
        parameters: ``get_attr`` targets that an ``infer`` may cast whose result ``allow`` ops alone read.
        rounds: an ``infer`` may narrow activations, as a 16-bit model does.
        sizes_known: false for a graph made without inputs, whose values are stand-ins of one element.
        measured: nodes that errors and bytes place, whatever their category.
        priced: what errors cost.
    """
    open_ones = {u for u in units if len(u.nodes) == 1 and u.nodes[0] in measured}
    folding = {u: fold for u, fold in _folding(units, folds or {}).items() if u not in open_ones}
    float32 = _forced(units, folding, open_ones)
    low = {u: Cause(Why.ALLOW) for u in units if u.category is Category.ALLOW and u not in open_ones}
    readers = {u: _readers(u, units, keep_output_dtype) for u in units}
    terms = list(_Terms(graph, units, float32, keep_output_dtype))
    provenance = Provenance.of(graph, units, parameters, sizes_known=sizes_known)
    spared = {u for u in units if u.category is Category.INFER} if rounds else _spared(units, readers)
    terms += _rules(units, folding, provenance, readers, spared, open_ones, rounds=rounds)
    terms += _taints(folding, float32.keys() | open_ones)
    terms += priced
    fixed: dict[Label, bool] = {OUTSIDE: False, **dict.fromkeys(float32, False), **dict.fromkeys(low, True)}
    found = cheapest(terms, fixed)
    for unit in units:
        if unit in open_ones:
            (low if unit in found else float32)[unit] = Cause(Why.MEASURED)
        elif unit in found:
            low.setdefault(unit, Cause(Why.FOLDED if unit in folding else Why.FEWEST_BYTES))
        else:
            float32.setdefault(unit, Cause(_why(unit, folding, units, found, provenance, spared, rounds=rounds)))
    return units.placements(decisions, low, float32)


def _folding(units: Units, folds: Mapping[fx.Node, Fold]) -> dict[Unit, Fold]:
    alone = (u for u in units if u.category in (Category.DENY, Category.PROMOTE) and len(u.nodes) == 1)
    return {u: folds[u.nodes[0]] for u in alone if u.nodes[0] in folds}


def _forced(units: Units, folding: Mapping[Unit, Fold], open_ones: Set[Unit]) -> dict[Unit, Cause]:
    """The units that are float32 wherever the rest is placed, with the reasons."""
    denied = [u for u in units if u.category in (Category.DENY, Category.KEEP) and u not in open_ones]
    found = {u: Cause(Why(u.category.value)) for u in denied if u not in folding}
    starts = [u for u in found if u.category is not Category.KEEP]
    tainted = reachable(starts, lambda u: (v for v in u.after if v.is_free and v not in open_ones))
    for unit, start in tainted.items():
        if unit.category in (Category.INFER, Category.PROMOTE):
            found.setdefault(unit, Cause(Why.AFTER, (start.name,)))
    allow = [u for u in units if u.category is Category.ALLOW or u in folding or u in open_ones]
    reached = reachable(allow, lambda u: (v for v in u.after if v.is_free))
    for unit in units:
        if unit.category is Category.INFER and unit not in reached and unit not in open_ones:
            found.setdefault(unit, Cause(Why.NO_ALLOW_BEFORE))
    return found


def _why(
    unit: Unit,
    folding: Mapping[Unit, Fold],
    units: Units,
    found: frozenset[Label],
    provenance: Provenance,
    spared: Set[Label],
    *,
    rounds: bool,
) -> Why:
    if unit in folding:
        return Why(unit.category.value)
    asked: Iterable[fx.Node] = ()
    if unit.category is Category.PROMOTE:
        asked = provenance.read_by(unit, units)
    elif unit.category is Category.INFER:
        outside = (n for n in unit.nodes if n in provenance.outside)
        asked = outside if rounds else _widening(unit, units, provenance, spares=unit in spared)
    if not found.issuperset(units.stored(read) or OUTSIDE for read in asked):
        return Why.INPUT_IS_FLOAT32
    return Why.FEWEST_BYTES


class _Terms:
    """The bytes of every placement, as terms of a cut."""

    def __init__(self, graph: fx.Graph, units: Units, float32: Mapping[Unit, Cause], keep_output_dtype: bool) -> None:
        self.units, self.float32 = units, float32
        self.graph, self.keep_output_dtype = graph, keep_output_dtype
        # By value: the nodes that read it, however often, each with the label of what it reads in.
        self.low_readers: dict[fx.Node, dict[fx.Node, Label]] = defaultdict(dict)
        self.float32_readers: dict[fx.Node, dict[fx.Node, Label]] = defaultdict(dict)

    def __iter__(self) -> Iterator[Term]:
        for node in self.graph.nodes:
            if node in self.units.of:
                yield from self._node(node, self.units.of[node])
            elif node.op == "output" and self.keep_output_dtype:
                for read in dict.fromkeys(u.node for u in uses(node) if is_float32(u.node)):
                    self.float32_readers[read][node] = OUTSIDE
        for value in dict.fromkeys((*self.low_readers, *self.float32_readers)):
            yield from self._casts(value)

    def _stored(self, value: fx.Node) -> Label:
        return self.units.stored(value) or OUTSIDE

    def _node(self, node: fx.Node, unit: Unit) -> Iterator[Term]:
        ports, moved = self.units.ports, moves(node)
        operands, decisive = ports.operands(node), ports.decisive(node)
        anchor = self._anchor(node, decisive)
        for use in (u for u in uses(node) if is_float32(u.node)):
            read, extra = use.node, _EXTRA * elements(use.node) if moved else 0
            if ports.stays_float32(node, use):
                self.float32_readers[read][node] = OUTSIDE
            elif ports.converts(node, use):
                yield Term(extra, (), (self._stored(read),))
                self.low_readers[read].setdefault(node, unit)
            elif read not in operands or read is anchor:
                yield Term(extra, (), (unit,))
                self.low_readers[read].setdefault(node, unit)
                self.float32_readers[read].setdefault(node, unit)
            elif read in decisive:
                yield Term(extra, (), (self._stored(read),))  # in float32 the kernel takes it as it is stored
                self.low_readers[read].setdefault(node, unit)
        if has_float32(node):
            stored, size = self._stored(node), elements(node)
            if moved:
                yield Term(_EXTRA * size, (), (stored,))
            if stored is not unit:
                yield from (Term(CAST * size, (unit,), (stored,)), Term(CAST * size, (stored,), (unit,)))

    def _anchor(self, node: fx.Node, decisive: tuple[fx.Node, ...]) -> fx.Node | None:
        """Of operands that mix, the one that is cast if the node is float32 and none of them is: the likeliest float32.

        Chosen beforehand, for "at least one of them" is nothing that a cut can decide.
        """
        return min(decisive, key=lambda r: self._likely_low(r, node)) if decisive else None

    def _likely_low(self, value: fx.Node, reader: fx.Node) -> tuple[int, int]:
        unit = self.units.stored(value)
        if unit is None or unit in self.float32 or unit is self.units.of[reader]:
            return 0, 0
        if unit.category is Category.ALLOW:
            return 3, elements(value)
        source = unit
        while source.category is Category.CLEAR and len(source.before) == 1:
            source = source.before[0]
        return (2 if source.category is Category.ALLOW else 1), 0

    def _casts(self, value: fx.Node) -> Iterator[Term]:
        """One cast to each precision, however many read it; of what is mutated, one for each reader."""
        stored, cost = self._stored(value), CAST * elements(value)
        low, float32 = tuple(self.low_readers[value].values()), tuple(self.float32_readers[value].values())
        if value in self.units.storages:
            yield from (Term(cost, (reader,), (stored,)) for reader in low if reader is not stored)
            yield from (Term(cost, (stored,), (reader,)) for reader in float32 if reader is not stored)
            return
        if low:
            yield Term(cost, low, (stored,))
        if float32:
            yield Term(cost, (stored,), float32)


def _readers(unit: Unit, units: Units, keep_output_dtype: bool) -> tuple[Label, ...]:
    """The labels of all that reads what a unit makes."""
    found: dict[Label, None] = {}
    made = reachable(unit.nodes, lambda node: (reader for reader in node.users if is_member(reader)))
    for reader in (reader for node in made for reader in node.users if not is_member(reader)):
        if reader in units.of:
            found[units.of[reader]] = None
        elif reader.op == "output" and keep_output_dtype:
            found[OUTSIDE] = None
    return tuple(label for label in found if label is not unit)


def _rules(
    units: Units,
    folding: Mapping[Unit, Fold],
    provenance: Provenance,
    readers: _Readers,
    spared: Set[Label],
    open_ones: Set[Unit],
    *,
    rounds: bool,
) -> Iterator[Term]:
    """Each neighbour that must be low where a unit is."""
    only_for_low = _only_for_allow(units, readers)
    only_beside_low = _only_for(only_for_low | spared, units, readers)
    for unit in (u for u in units if u not in open_ones):
        asked: Iterable[fx.Node] = ()
        if unit in folding:
            asked = dict.fromkeys(folding[unit].reads)
            yield from (Term(None, (unit,), (reader,)) for reader in readers[unit])
        elif unit.category is Category.PROMOTE:
            asked = provenance.read_by(unit, units)
        elif unit.category is Category.INFER and not rounds:
            asked = _widening(unit, units, provenance, spares=unit in spared)
        elif unit.category is Category.INFER and not provenance.outside.isdisjoint(unit.nodes):
            yield Term(None, (unit,), (OUTSIDE,))
        elif unit.category is Category.CLEAR and unit not in only_for_low:
            held = provenance.parameters if unit in only_beside_low else frozenset[fx.Node]()
            asked = (read for read in provenance.read_by(unit, units) if read not in held)
        yield from (Term(None, (unit,), (units.stored(read) or OUTSIDE,)) for read in asked)


def _only_for(chosen: Set[Label], units: Units, readers: _Readers) -> set[Label]:
    """These units, and the ``clear`` units that they alone read."""
    found = {*chosen}
    for unit in reversed(list(units)):
        if unit.category is Category.CLEAR and _all_in(found, readers[unit]):
            found.add(unit)
    return found


def _only_for_allow(units: Units, readers: _Readers) -> set[Label]:
    return _only_for({u for u in units if u.category is Category.ALLOW}, units, readers)


def _spared(units: Units, readers: _Readers) -> set[Label]:
    """The ``infer`` units that ``allow`` ops alone read: their results are rounded in any case."""
    only_for_low = _only_for_allow(units, readers)
    return {u for u in units if u.category is Category.INFER and _all_in(only_for_low, readers[u])}


def _all_in(chosen: Set[Label], readers: tuple[Label, ...]) -> bool:
    return bool(readers) and chosen >= {*readers}


def _widening(unit: Unit, units: Units, provenance: Provenance, *, spares: bool) -> Iterator[fx.Node]:
    """The operands that make a float32 result.

    A unit that ``spares`` parameters is not widened by one that is spread over rows: a bias, a scale. A parameter of
    the result's size is a value: weights that the model itself updates, a state that is learned.
    """
    for node in unit.nodes:
        for read in decisive(node, units.ports, provenance.outside):
            if not (spares and read in provenance.parameters) or _is_whole(read, node, provenance):
                yield read


def _is_whole(parameter: fx.Node, node: fx.Node, provenance: Provenance) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    same = tensors(parameter)[0].numel() == tensors(node)[0].numel()
    return provenance.sizes_known and statically_known_true(same)


def _taints(folding: Mapping[Unit, Fold], float32: Set[Unit]) -> Iterator[Term]:
    """Where a ``deny`` that folds is float32 after all, it may taint what follows."""
    tainting = {unit for unit, fold in folding.items() if fold.taints}
    reached = reachable(tainting, lambda u: (v for v in u.after if v.is_free and v not in float32))
    for unit in (u for u in reached if u not in tainting):
        for before in dict.fromkeys(unit.before):
            if before in tainting:
                yield Term(None, (_Taint(unit),), (before,))
            elif before in reached:
                yield Term(None, (_Taint(unit),), (_Taint(before),))
        if unit.category in (Category.INFER, Category.PROMOTE):
            yield Term(None, (unit,), (_Taint(unit),))
