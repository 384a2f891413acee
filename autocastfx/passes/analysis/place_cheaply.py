"""decisions → the placements that move the fewest bytes: a minimum cut. Pure: no edge is touched, no pass is known.

What the categories leave free is labelled low or float32. ``allow`` and ``deny`` are given; an ``infer`` after a
``deny`` is float32 (TensorFlow's rule), and so is one that no ``allow`` comes before; a ``deny`` that folds may be low
between low neighbours. float32 stays float32 until an ``allow`` asks for less: an ``infer`` or a ``promote`` is low
only if its operands are (torch's own promotion), and so is a ``clear``, but for one that ``allow`` ops alone read. An
``infer`` that they alone read may cast a parameter. Neither holds where so many read it that 16 bits could not add up
their gradients. With ``rounds``, an ``infer`` may narrow what an ``allow`` led to, never what came from outside. Ties
are float32.

A node whose error was measured is free of these rules: bytes and errors choose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, aliased, moves, reachable
from autocastfx.graph.magnitude import read_as_scores, takes_mask
from autocastfx.graph.names import base_name, kernel_name, op_name
from autocastfx.graph.node import Use, argument, elements, has_float32, is_float32, is_member, producer, tensors, uses
from autocastfx.passes.analysis.backward_adds import Readers
from autocastfx.passes.analysis.min_cut import OUTSIDE, Label, Term, cheapest
from autocastfx.passes.analysis.units import Ports, Unit, Units, is_size, with_dimensions
from autocastfx.plan.plan import WIDE, Cause, Decision, Forced, Placement, Precision, Why
from autocastfx.policy.kernel_facts import PARAMETERS
from autocastfx.policy.rule import Category

_FEW = Readers()


def place_cheaply(
    graph: fx.Graph,
    decisions: Mapping[fx.Node, Decision],
    units: Units,
    *,
    folds: Mapping[fx.Node, Fold] | None = None,
    keep_output_dtype: bool = True,
    parameters: frozenset[str] = frozenset(),
    rounds: bool = False,
    measured: frozenset[fx.Node] = frozenset(),
    priced: Iterable[Term] = (),
    readers_of: Readers = _FEW,
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
        measured: nodes that errors and bytes place, whatever their category.
        priced: what errors cost.
        readers_of: how many gradients the readers of a value give it.
    """
    open_ones = {u for u in units if len(u.nodes) == 1 and u.nodes[0] in measured}
    folding = {u: fold for u, fold in _folding(units, folds or {}).items() if u not in open_ones}
    float32 = _forced(units, folding, open_ones)
    low = {u: Cause(Why(u.category.value)) for u in units if u.category.is_low and u not in open_ones}
    readers = {u: _readers(u, units, keep_output_dtype) for u in units}
    terms = list(_Terms(graph, units, float32, keep_output_dtype, readers_of))
    provenance = Provenance.of(graph, units, parameters)
    crowded = {u for u in units if any(readers_of.casts(node) > 1 for node in u.nodes)}
    narrowed_anyway = _narrowed_anyway(units, readers, crowded, rounds=rounds)
    terms += _rules(units, folding, provenance, readers, narrowed_anyway, open_ones, crowded, rounds=rounds)
    terms += _taints(folding, float32.keys() | open_ones)
    terms += priced
    fixed: dict[Label, bool] = {OUTSIDE: False, **dict.fromkeys(float32, False), **dict.fromkeys(low, True)}
    low_labels = cheapest(terms, fixed)
    for unit in units:
        if unit in open_ones:
            (low if unit in low_labels else float32)[unit] = Cause(Why.MEASURED)
        elif unit in low_labels:
            low.setdefault(unit, Cause(Why.FOLDED if unit in folding else Why.FEWEST_BYTES))
        else:
            why = _why(unit, folding, units, low_labels, provenance, narrowed_anyway, rounds=rounds)
            float32.setdefault(unit, Cause(why))
    return units.placements(decisions, low, float32)


# Folding: which nodes may yet take and give 16 bits where their list asks for float32. Pure.
#
# A ``deny`` node may, whose kernel computes in float32 inside; and a ``promote`` node that only joins values (a class
# token to activations, say): where all its readers are low, it rounds what they would round.


@dataclass(frozen=True)
class Fold:
    """The conditions on a node's neighbours under which it folds, beside that all its readers are low.

    Attributes:
        reads: the values that must be low for it to be low. Not what the model holds: a norm that takes no float32
            parameters reads them in 16 bits.
        taints: whether the node, where it is float32 after all, draws what follows it to float32. Not where its result
            may be rounded anyway.
    """

    reads: tuple[fx.Node, ...]
    taints: bool = True


@dataclass(frozen=True)
class Folding:
    """The rules of one conversion.

    Attributes:
        ports: which inputs share a node's precision, and the facts: which ops fold.
        level: ``"none"``, ``"exact"`` or ``"kernel"``.
        low: name of the 16-bit dtype.
    """

    ports: Ports
    level: str
    low: str

    def __call__(
        self, graph: fx.Graph, decisions: Mapping[fx.Node, Decision], wide: frozenset[fx.Node]
    ) -> dict[fx.Node, Fold]:
        """The folds of ``graph``.

        Args:
            graph: captured, with abstract values.
            decisions: one for every computing node.
            wide: values that hold finite numbers beyond the low dtype's range.
        """
        folds: dict[fx.Node, Fold] = {}
        for node in reversed(graph.nodes):
            category = decisions[node].category if node in decisions else None
            if category is Category.PROMOTE and self.level == "kernel" and self._joins_what_came_in(node):
                folds[node] = Fold((), taints=False)
            elif category is not None and category.is_float32:
                reads = self._reads(node, decisions[node], wide, folds)
                if reads:
                    folds[node] = Fold(reads, taints=self._may_fold(node, "exact"))
        return folds

    def _reads(
        self, node: fx.Node, decision: Decision, wide: frozenset[fx.Node], later: Mapping[fx.Node, Fold]
    ) -> tuple[fx.Node, ...]:
        """Return the values that ``node`` must read in 16 bits to fold; none if it does not fold."""
        given = (u for u in uses(node) if not self.ports.stays_float32(node, u))
        asked = tuple(u for u in given if is_float32(u.node) and any(t.ndim for t in tensors(u.node)))
        if decision.source == WIDE and self.level == "kernel":
            masks = [u for u in asked if u.node in wide]
            is_masked = all(takes_mask(node, u) for u in masks) and all(reader in later for reader in node.users)
            return tuple(u.node for u in asked if u not in masks) if is_masked else ()
        if isinstance(decision.source, Forced) or argument(node, "dtype") is not None:  # the call asks for float32
            return ()
        return tuple(u.node for u in asked if u.node.op != "get_attr") if self._may_fold(node, self.level) else ()

    def _may_fold(self, node: fx.Node, level: str) -> bool:
        facts, name = self.ports.facts, self.ports.kernel(node)
        if name in facts.folds_with_parameters and not any(u.argument in PARAMETERS for u in uses(node)):
            return False
        return facts.may_fold(name, self.low, self.ports.device, level)

    def _joins_what_came_in(self, node: fx.Node) -> bool:
        """True if ``node`` joins a parameter, an input of the graph, or a view of one: float32 in any case."""
        joins = kernel_name(node) in self.ports.facts.joins
        return joins and any(_came_in(u.node) for u in uses(node) if is_float32(u.node))


def _came_in(value: fx.Node) -> bool:
    return value.op in ("placeholder", "get_attr") or any(_came_in(source) for source in aliased(value))


# Where the values of a graph come from: a parameter, outside of the model, or an op that computes in 16 bits.


@dataclass(frozen=True)
class Provenance:
    """Float32 values by where they come from.

    Attributes:
        parameters: parameters and views of them. Weights are trained to be rounded; torch.autocast casts them too.
        outside: inputs, buffers, constants, what is made from no float32 value (``arange``, a cast from integers), and
            all that free ops compute with one of these: positions, states, accumulators. The rows that an embedding
            picks out of a parameter are not among them, nor are scores to which a mask was added.
    """

    parameters: frozenset[fx.Node]
    outside: frozenset[fx.Node]

    def read_by(self, unit: Unit, units: Units) -> Iterator[fx.Node]:
        """The float32 operands that make a unit float32."""
        return (read for node in unit.nodes for read in decisive(node, units.ports, self.outside))

    @classmethod
    def of(cls, graph: fx.Graph, units: Units, parameters: frozenset[str]) -> Provenance:
        """The provenance of each float32 value of ``graph``.

        Args:
            graph: captured, with abstract values.
            units: of the same graph; a storage that is written into has one provenance.
            parameters: ``get_attr`` targets.
        """
        written = alias_sets(graph).keys()
        of_parameters: set[fx.Node] = set()
        outside: set[fx.Node] = set()
        for node in graph.nodes:
            if not has_float32(node):
                continue
            unit = units.of.get(producer(node))
            if unit is None:
                (of_parameters if node.op == "get_attr" and str(node.target) in parameters else outside).add(node)
                continue
            reads = list(decisive(node, units.ports, outside))
            if unit.category is Category.CLEAR and reads and of_parameters.issuperset(reads):
                of_parameters.add(node)
            elif unit.category is Category.KEEP:
                outside.update([node] if not reads or not of_parameters.issuperset(reads) else [])
            elif unit.is_free and not outside.isdisjoint(reads) and not _adds_mask(node, outside, written):
                outside.add(node)
        return cls(frozenset(of_parameters), frozenset(outside))


def _adds_mask(node: fx.Node, outside: Set[fx.Node], written: Set[fx.Node]) -> bool:
    """True if ``node`` adds what comes from outside to scores that a softmax alone reads."""
    others = [u for u in uses(node) if u.node not in outside and has_float32(u.node)]
    masks = [u for u in uses(node) if u.node in outside]
    is_mask = bool(others) and all(takes_mask(node, u) for u in masks)
    return is_mask and bool(node.users) and bool(read_as_scores(node, written))


def decisive(node: fx.Node, ports: Ports, outside: Set[fx.Node]) -> Iterator[fx.Node]:
    """The float32 operands that make ``node`` float32 by torch's promotion: those with dimensions, or all if none has.

    A single number beside them widens nothing, but one that comes from ``outside`` and is added: 80 metres and a
    correction have no digits for the correction in 16 bits.
    """
    made_by = producer(node)
    name = base_name(op_name(made_by))
    kept = (u for u in uses(made_by) if has_float32(u.node) and not is_size(u, name))
    reads = tuple(u.node for u in kept if not ports.stays_float32(made_by, u))
    shaped, is_sum = with_dimensions(reads), ports.facts.whole_numbers.get(name) == "added"
    yield from (read for read in reads if read in shaped or (is_sum and read in outside))


# The values that are read in 16 bits alone, and the views of weights that may be made so.


def is_read_low(value: fx.Node, placements: Mapping[fx.Node, Placement], ports: Ports) -> bool:
    """True if ``value`` is read, and every reader casts it to 16 bits, by these placements."""
    for reader in value.users:
        placement = placements.get(reader)
        if placement is None or placement.run is not Precision.LOW:
            return False
        read = [use for use in uses(reader) if use.node is value]
        if any(u.argument in placement.as_stored or ports.stays_float32(reader, u) for u in read):
            return False
    return bool(value.users)


def lower_views(
    graph: fx.Graph,
    decisions: Mapping[fx.Node, Decision],
    placements: Mapping[fx.Node, Placement],
    parameters: frozenset[str],
    ports: Ports,
) -> dict[fx.Node, Placement]:
    """``placements`` with the float32 views of parameters that only low ops read made low, where that changes no bit.

    The cast before them is then one of the parameter itself. A view shows each element at most once, so that its
    backward adds nothing up in 16 bits; and it is read either by low ops alone, or by one further such view alone, so
    that all gradients meet where they did.
    """
    storages, new_placements = alias_sets(graph, ports.written), dict(placements)
    views: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_view(node, parameters, views) and node not in storages and decisions[node].category is Category.CLEAR:
            views.add(node)
    lowered = set[fx.Node]()
    for node in (n for n in reversed(list(graph.nodes)) if n in views):
        was = placements[node]
        follows = len(node.users) == 1 and next(iter(node.users)) in lowered
        is_wide = was.run is Precision.FLOAT32 and was.store is Precision.FLOAT32
        if is_wide and (follows or is_read_low(node, placements, ports)):
            new_placements[node] = Placement(Precision.LOW, Precision.LOW, Cause(Why.VIEW_OF_WEIGHT))
            lowered.add(node)
    return new_placements


def _is_view(node: fx.Node, parameters: frozenset[str], views: set[fx.Node]) -> bool:
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or not is_float32(node):
        return False
    (source,) = node.all_input_nodes
    of_weight = source in views or (source.op == "get_attr" and source.target in parameters)
    return of_weight and source in aliased(node) and all(_is_injective(t) for t in tensors(node))


def _is_injective(view: torch.Tensor) -> bool:
    """True if no two elements of ``view`` share memory."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


# The cost of a placement: bytes of float32 values, and of their 16-bit versions, that ops read and write.

CAST = Precision.LOW.size + Precision.FLOAT32.size  # one is read, the other written


def bytes_moved(
    graph: fx.Graph,
    placements: Mapping[fx.Node, Placement],
    units: Units,
    *,
    keep_output_dtype: bool = True,
    weights: frozenset[fx.Node] = frozenset(),
    readers_of: Readers = _FEW,
) -> int:
    """Bytes read and written by the computing nodes of ``graph`` and the casts that ``placements`` need.

    Values that are not float32 as captured are left out, as no placement changes them; so are casts of ``weights`` to
    16 bits. Sizes are those of the example inputs.
    """

    def stored(value: fx.Node) -> Precision:
        return placements[value].store if value in placements else Precision.FLOAT32

    casts: dict[tuple[fx.Node, Precision, fx.Node | None], int] = {}
    moved = 0
    for node in graph.nodes:
        computes = node in placements and placements[node].run is not Precision.CAPTURED and not is_member(node)
        if not computes and node.op != "output":
            continue
        counts = computes and moves(node)
        for use in (u for u in uses(node) if is_float32(u.node)):
            read_in = _read_in(node, use, placements.get(node), units, keep_output_dtype) or stored(use.node)
            is_weight = read_in is Precision.LOW and use.node in weights
            if read_in is not stored(use.node) and not is_weight:
                reader = node if use.node in units.storages else None  # what is mutated is cast anew for each reader
                shared = readers_of.casts(use.node) if read_in is Precision.LOW and reader is None else 1
                casts[use.node, read_in, reader] = CAST * elements(use.node) * shared
            if counts:
                moved += read_in.size * elements(use.node)
        if counts:
            placement = placements[node]
            moved += placement.store.size * elements(node)
            moved += CAST * elements(node) if placement.run is not placement.store else 0
    return moved + sum(casts.values())


def _read_in(
    node: fx.Node, use: Use, placement: Placement | None, units: Units, keep_output_dtype: bool
) -> Precision | None:
    """The precision that ``node`` reads a value in; None for: as it is stored."""
    if placement is None:
        return Precision.FLOAT32 if keep_output_dtype else None
    if use.argument in placement.as_stored:
        return None
    return Precision.FLOAT32 if units.ports.stays_float32(node, use) else placement.run


_EXTRA = Precision.FLOAT32.size - Precision.LOW.size


_Readers = Mapping[Unit, tuple[Label, ...]]


@dataclass(frozen=True)
class _Taint:
    """The label of whether a ``deny`` that folds has tainted a unit; low if not."""

    unit: Unit


def _folding(units: Units, folds: Mapping[fx.Node, Fold]) -> dict[Unit, Fold]:
    alone = (u for u in units if (u.category.is_float32 or u.category is Category.PROMOTE) and len(u.nodes) == 1)
    return {u: folds[u.nodes[0]] for u in alone if u.nodes[0] in folds}


def _forced(units: Units, folding: Mapping[Unit, Fold], open_ones: Set[Unit]) -> dict[Unit, Cause]:
    """The units that are float32 wherever the rest is placed, with the reasons."""
    denied = [u for u in units if u.category.is_fixed and u not in open_ones]
    float32 = {u: Cause(Why(u.category.value)) for u in denied if u not in folding}
    starts = [u for u in float32 if u.category.taints]
    tainted = reachable(starts, lambda u: (v for v in u.after if v.is_free and v not in open_ones))
    for unit, start in tainted.items():
        if unit.category in (Category.INFER, Category.PROMOTE):
            float32.setdefault(unit, Cause(Why.AFTER, (start.name,)))
    allow = [u for u in units if u.category.leads or u in folding or u in open_ones]
    reached = reachable(allow, lambda u: (v for v in u.after if v.is_free))
    for unit in units:
        if unit.category is Category.INFER and unit not in reached and unit not in open_ones:
            float32.setdefault(unit, Cause(Why.NO_ALLOW_BEFORE))
    return float32


def _why(
    unit: Unit,
    folding: Mapping[Unit, Fold],
    units: Units,
    low_labels: frozenset[Label],
    provenance: Provenance,
    narrowed_anyway: Set[Label],
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
        asked = outside if rounds else _widening(unit, units, provenance, spares=unit in narrowed_anyway)
    if not low_labels.issuperset(units.stored(read) or OUTSIDE for read in asked):
        return Why.INPUT_IS_FLOAT32
    return Why.FEWEST_BYTES


class _Terms:
    """The bytes of every placement, as terms of a cut."""

    def __init__(
        self,
        graph: fx.Graph,
        units: Units,
        float32: Mapping[Unit, Cause],
        keep_output_dtype: bool,
        readers_of: Readers,
    ) -> None:
        self.units, self.float32, self.readers_of = units, float32, readers_of
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
        if unit.category.is_low:
            return 3, elements(value)
        source = unit
        while source.category is Category.CLEAR and len(source.before) == 1:
            source = source.before[0]
        return (2 if source.category.is_low else 1), 0

    def _casts(self, value: fx.Node) -> Iterator[Term]:
        """One cast to each precision, or several if many read it; of what is mutated, one for each reader."""
        stored, cost = self._stored(value), CAST * elements(value)
        low, float32 = tuple(self.low_readers[value].values()), tuple(self.float32_readers[value].values())
        if value in self.units.storages:
            yield from (Term(cost, (reader,), (stored,)) for reader in low if reader is not stored)
            yield from (Term(cost, (stored,), (reader,)) for reader in float32 if reader is not stored)
            return
        if low:
            yield Term(cost * self.readers_of.casts(value), low, (stored,))
        if float32:
            yield Term(cost, (stored,), float32)


def _readers(unit: Unit, units: Units, keep_output_dtype: bool) -> tuple[Label, ...]:
    """The labels of all that reads what a unit makes."""
    labels: dict[Label, None] = {}
    made = reachable(unit.nodes, lambda node: (reader for reader in node.users if is_member(reader)))
    for reader in (reader for node in made for reader in node.users if not is_member(reader)):
        if reader in units.of:
            labels[units.of[reader]] = None
        elif reader.op == "output" and keep_output_dtype:
            labels[OUTSIDE] = None
    return tuple(label for label in labels if label is not unit)


def _rules(
    units: Units,
    folding: Mapping[Unit, Fold],
    provenance: Provenance,
    readers: _Readers,
    narrowed_anyway: Set[Label],
    open_ones: Set[Unit],
    crowded: Set[Label],
    *,
    rounds: bool,
) -> Iterator[Term]:
    """Each neighbour that must be low where a unit is."""
    only_for_low = _only_for_allow(units, readers, crowded)
    only_beside_low = _only_for(only_for_low | narrowed_anyway, units, readers, crowded)
    for unit in (u for u in units if u not in open_ones):
        asked: Iterable[fx.Node] = ()
        if unit in folding:
            asked = dict.fromkeys(folding[unit].reads)
            yield from (Term(None, (unit,), (reader,)) for reader in readers[unit])
        elif unit.category is Category.PROMOTE:
            asked = provenance.read_by(unit, units)
        elif unit.category is Category.INFER and not rounds:
            asked = _widening(unit, units, provenance, spares=unit in narrowed_anyway)
        elif unit.category is Category.INFER and not provenance.outside.isdisjoint(unit.nodes):
            yield Term(None, (unit,), (OUTSIDE,))
        elif unit.category is Category.CLEAR and unit not in only_for_low:
            parameters = provenance.parameters if unit in only_beside_low else frozenset[fx.Node]()
            asked = (read for read in provenance.read_by(unit, units) if read not in parameters)
        yield from (Term(None, (unit,), (units.stored(read) or OUTSIDE,)) for read in asked)


def _only_for(chosen: Set[Label], units: Units, readers: _Readers, crowded: Set[Label]) -> set[Label]:
    """These units, and the ``clear`` units that they alone read; not those that so many read."""
    labels = {*chosen}
    for unit in reversed(list(units)):
        if unit.category is Category.CLEAR and unit not in crowded and _all_in(labels, readers[unit]):
            labels.add(unit)
    return labels


def _only_for_allow(units: Units, readers: _Readers, crowded: Set[Label]) -> set[Label]:
    return _only_for({u for u in units if u.category.is_low}, units, readers, crowded)


def _narrowed_anyway(units: Units, readers: _Readers, crowded: Set[Label], *, rounds: bool) -> set[Label]:
    """The ``infer`` units that ``allow`` ops alone read, not too many; all if 16 bits ``rounds`` what is added."""
    only_for_low = _only_for_allow(units, readers, crowded)
    infer = (u for u in units if u.category is Category.INFER)
    return {u for u in infer if rounds or (u not in crowded and _all_in(only_for_low, readers[u]))}


def _all_in(chosen: Set[Label], readers: tuple[Label, ...]) -> bool:
    return bool(readers) and chosen >= {*readers}


def _widening(unit: Unit, units: Units, provenance: Provenance, *, spares: bool) -> Iterator[fx.Node]:
    """The operands that make a float32 result.

    A unit that ``spares`` parameters is not widened by one that is spread over rows: a bias, a scale. A parameter of
    the result's size is a value: weights that the model itself updates, a state that is learned.
    """
    for node in unit.nodes:
        for read in decisive(node, units.ports, provenance.outside):
            if not (spares and read in provenance.parameters) or _is_whole(read, node):
                yield read


def _is_whole(parameter: fx.Node, node: fx.Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    same = tensors(parameter)[0].numel() == tensors(node)[0].numel()
    return statically_known_true(same)


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
