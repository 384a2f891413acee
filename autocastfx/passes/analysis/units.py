"""Nodes that take one precision together: a single node, or all views and writers of one mutated storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.graph.alias import AliasSet, alias_sets, mutated_inputs
from autocastfx.graph.names import base_name, kernel_name, op_name
from autocastfx.graph.node import (
    Use,
    argument,
    dtypes,
    elements,
    has_float32,
    is_float32,
    is_member,
    producer,
    tensors,
    uses,
)
from autocastfx.plan.plan import SUB_GRAPH, Cause, Decision, Placement, Precision, Why
from autocastfx.policy.kernel_facts import PARAMETERS, KernelFacts
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category
from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss
from autocastfx.runtime.operators.norms import layer_norm


@dataclass(eq=False)
class Unit:
    """Nodes that are placed as one. ``before`` and ``after`` are its neighbours, once for each value between them."""

    nodes: list[fx.Node]
    category: Category
    before: list[Unit] = field(default_factory=list)
    after: list[Unit] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its first node."""
        return self.nodes[0].name

    @property
    def is_free(self) -> bool:
        """True if its category leaves its precision to the placement."""
        return self.category.is_free


# A cross entropy over classes that widens 16-bit logits itself.


def is_over_classes(node: fx.Node) -> bool:
    """True for a ``cross_entropy_loss`` that PyTorch computes as ``nll_loss_nd`` of a ``log_softmax``.

    It is where the target holds class indices and no label is smoothed (``aten/src/ATen/native/LossNLL.cpp``).
    """
    if node.target is not torch.ops.aten.cross_entropy_loss.default:
        return False
    target = argument(node, "target")
    indexes = isinstance(target, fx.Node) and any(not (d.is_floating_point or d.is_complex) for d in dtypes(target))
    return indexes and not argument(node, "label_smoothing")


def read_low(node: fx.Node, *, rounds: bool, recomputes: bool) -> None:
    """Make of ``node``, in place, the operator that reads 16-bit logits and gives float32.

    Args:
        node: a cross entropy over classes.
        rounds: whether what it keeps for backward may be rounded. Else its numbers are those of the cross entropy of
            float32 logits, and so are the gradients.
        recomputes: whether the logits are in backward what they were.
    """
    given = {key: argument(node, key) for key in ("weight", "reduction", "ignore_index")}
    options = {**({"rounds": True} if rounds else {}), **({} if recomputes else {"recomputes": False})}
    node.target = cross_entropy_loss
    node.args = argument(node, "self"), argument(node, "target")
    node.kwargs = {**{key: value for key, value in given.items() if value is not None}, **options}


# What the list says of an op, whatever module and device it is in.


def listed_category(node: fx.Node, op_list: OpList) -> Category | None:
    """The category that the list gives the op of ``node``; None if it has no rule for it, or ``node`` calls no op."""
    rule = op_list.rule(op_name(node)) if node.op == "call_function" else None
    return None if rule is None else rule.category


def is_size(use: Use, name: str) -> bool:
    """True if the op ``name`` reads but the size, or the dtype, of the value of this use: ``expand_as``."""
    return name.endswith("_as") and use.argument == "other"


def only_moves(node: fx.Node, op_list: OpList) -> bool:
    """True if the list says that ``node`` only moves or selects values."""
    return listed_category(node, op_list) is Category.CLEAR


def behind_moves(value: fx.Node, op_list: OpList) -> fx.Node:
    """The value that ``value`` shows, behind the ops that only move it."""
    while only_moves(value, op_list) and len(value.all_input_nodes) == 1:
        value = value.all_input_nodes[0]
    return value


# The inputs of a node that are not cast to the precision that it runs in: one answer for all passes.

_CASTS = ("to", "_to_copy")
# Operators of this package that take 16-bit values beside float32 parameters, by torch's of the same schema.
_OURS: Mapping[object, OpOverload] = {torch.ops.aten.layer_norm.default: layer_norm}


@dataclass(frozen=True)
class Ports:
    """The rules of one conversion."""

    op_list: OpList
    facts: KernelFacts
    device: str = "cpu"  # type of the one that the graph will run on

    def stays_float32(self, node: fx.Node, use: Use) -> bool:
        """True if the argument is one of the op's ``keep_args``, or a parameter that its kernel takes in float32."""
        if use.argument in self.op_list.kept(op_name(node)):
            return True
        return use.argument in PARAMETERS and self.kernel(node) in self._float32_parameters

    @property
    def _float32_parameters(self) -> frozenset[str]:
        return self.facts.float32_parameters.get(self.device, frozenset())

    def stand_in(self, node: fx.Node) -> OpOverload | None:
        """The operator of this package that takes the place of ``node``'s where it runs low, if there is one."""
        ours = _OURS.get(node.target)
        return ours if ours is not None and ours._schema.name in self._float32_parameters else None

    def kernel(self, node: fx.Node) -> str:
        """Return the ``kernel_name`` under which kernel facts list ``node``, where it runs low."""
        ours = self.stand_in(node)
        return kernel_name(node) if ours is None else str(ours._schema.name)

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The float32 values that an op of ``mixed_args`` takes in any mixture of precisions; nothing for other ops.

        Those that set the precision of the result come first: the ones with dimensions, if any has some.
        """
        if base_name(op_name(node)) not in self.facts.mixed_args:
            return ()
        reads = dict.fromkeys(u.node for u in uses(node))
        if any(not is_float32(read) and any(d.is_floating_point for d in dtypes(read)) for read in reads):
            return ()
        return tuple(sorted((read for read in reads if is_float32(read)), key=lambda r: tensors(r)[0].ndim == 0))

    def decisive(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the ``operands`` that set the precision of the result."""
        return with_dimensions(self.operands(node))

    def converts(self, node: fx.Node, use: Use) -> bool:
        """True if ``node`` itself makes float32 of the value of this use.

        A cast does, an op with a dtype argument, and a cross entropy.
        """
        name = op_name(node)
        if name in _CASTS:
            return use.argument == "self" and argument(node, "dtype") == torch.float32 and is_float32(node)
        return use.argument == "self" and (self.asks_dtype(node) or is_over_classes(node))

    def asks_dtype(self, node: fx.Node) -> bool:
        """True if the dtype argument of ``node`` asks for a float32 result."""
        if base_name(op_name(node)) not in self.facts.takes_dtype or not isinstance(node.target, OpOverload):
            return False
        return any(a.name == "dtype" for a in node.target._schema.arguments) and not mutated_inputs(node)

    def reads_as_stored(
        self, nodes: Iterable[fx.Node], placements: Mapping[fx.Node, Placement], written: Set[fx.Node]
    ) -> dict[fx.Node, tuple[str, ...]]:
        """For each node, the arguments that it takes as they are stored.

        Where a value is cast to float32 for one reader, all float32 readers take that cast: then what flows back to
        the value is added up in float32. Not of ``written`` values, which are cast anew for each reader.
        """
        arguments = {node: self.as_stored(node, placements) for node in nodes}
        cast: set[fx.Node] = set()
        for node, taken in arguments.items():
            if node in placements and placements[node].run is Precision.FLOAT32:
                cast.update(u.node for u in uses(node) if u.argument not in taken and u.node not in written)
        for node, taken in arguments.items():
            if taken and placements[node].run is Precision.FLOAT32 and not self.asks_dtype(node):
                shared = {u.argument for u in uses(node) if u.node in cast}
                arguments[node] = tuple(name for name in taken if name not in shared)
        return arguments

    def as_stored(self, node: fx.Node, placements: Mapping[fx.Node, Placement]) -> tuple[str, ...]:
        """The arguments that ``node`` takes as they are stored, for its kernel computes in the widest precision.

        A node that runs low so reads 0-d operands. One that runs in float32 so reads what it converts itself, and all
        its low operands as long as one decisive operand is float32: if none is, the smallest is cast.
        """
        placement = placements.get(node)
        if placement is None:
            return ()
        if placement.run is Precision.FLOAT32:
            low = {u.node for u in uses(node) if u.node in placements and placements[u.node].store is Precision.LOW}
            if converting := tuple(u.argument for u in uses(node) if u.node in low and self.converts(node, u)):
                return converting
        operands = self.operands(node)
        if not operands:
            return ()
        decisive = with_dimensions(operands)
        if placement.run is Precision.LOW:
            uncast = set(operands) - set(decisive)
        else:
            uncast = {r for r in operands if r in placements and placements[r].store is Precision.LOW}
            if all(r in uncast for r in decisive):
                uncast.discard(min(decisive, key=elements))
        return tuple(u.argument for u in uses(node) if u.node in uncast)

    def written(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values that ``node`` writes into and that share its precision (batch_norm's statistics do not)."""
        mutated = mutated_inputs(node)
        kept = {u.node for u in uses(node) if self.stays_float32(node, u)} if mutated else ()
        return tuple(n for n in mutated if n not in kept)


def with_dimensions(operands: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """The operands that have dimensions; all of them if none has."""
    return tuple(r for r in operands if tensors(r)[0].ndim) or operands


@dataclass(frozen=True)
class Units:
    """The units of a graph.

    Attributes:
        of: the unit that a computing node runs in.
        storages: the set of values that share its storage, for each value that is mutated somewhere.
        ports: which inputs of a node share its precision.
    """

    of: Mapping[fx.Node, Unit]
    storages: Mapping[fx.Node, AliasSet]
    ports: Ports

    def __iter__(self) -> Iterator[Unit]:
        return iter(dict.fromkeys(self.of.values()))

    def stored(self, value: fx.Node) -> Unit | None:
        """The unit whose precision the storage of ``value`` has; None for what no unit makes, which is float32."""
        made_by = producer(value)
        if made_by in self.storages and self.storages[made_by].root is made_by:
            others = (self.of[n] for n in self.storages[made_by].members if n in self.of)
            return next((u for u in others if u is not self.of.get(made_by)), self.of.get(made_by))
        return self.of.get(made_by)

    def placements(
        self, decisions: Mapping[fx.Node, Decision], low: Mapping[Unit, Cause], float32: Mapping[Unit, Cause]
    ) -> dict[fx.Node, Placement]:
        """A placement for each computing node, from the units that are low and those that are not, with the reasons."""
        placements: dict[fx.Node, Placement] = {}
        for node in decisions:
            if is_member(node):
                continue
            if not has_float32(node) and not any(has_float32(u.node) for u in uses(node)):
                is_border = decisions[node].source == SUB_GRAPH
                placements[node] = _as_captured(Why.CROSSES_BORDER if is_border else Why.NO_FLOAT32)
                continue
            unit, stored = self.of[node], self.stored(node)
            shares = unit.category.is_float32 and not decisions[node].category.is_float32
            because = low.get(unit) or (Cause(Why.SHARES_STORAGE) if shares else float32[unit])
            run, store = (Precision.LOW if u in low else Precision.FLOAT32 for u in (unit, stored))
            placements[node] = Placement(run, store, because)
        for node in (n for n in decisions if is_member(n)):
            placements[node] = placements[producer(node)] if has_float32(node) else _as_captured(Why.NO_FLOAT32)
        as_stored = self.ports.reads_as_stored(decisions, placements, self.storages.keys())
        return {n: replace(placements[n], as_stored=as_stored[n]) for n in decisions}


def _as_captured(why: Why) -> Placement:
    return Placement(Precision.CAPTURED, Precision.CAPTURED, Cause(why))


def units_of(graph: fx.Graph, decisions: Mapping[fx.Node, Decision], ports: Ports) -> Units:
    """The units of ``graph``, in its order.

    Args:
        graph: captured, with abstract values.
        decisions: one for every ``call_*`` node.
        ports: which inputs of a node share its precision.
    """
    storages = alias_sets(graph, ports.written)
    position = {node: i for i, node in enumerate(graph.nodes)}
    units: dict[fx.Node, Unit] = {}
    for node in (n for n in decisions if not is_member(n) and n not in units):
        storage = storages.get(node)
        if storage is None or _computes_apart(node, storage, decisions):
            unit = Unit([node], decisions[node].category)
        else:
            tied = sorted((n for n in storage.members if n in decisions and not is_member(n)), key=position.__getitem__)
            tied = [n for n in tied if not _computes_apart(n, storage, decisions)]
            categories = {decisions[n].category for n in tied}
            # A storage made by no op (a graph input, a parameter, a buffer) stays as it was captured.
            stays = decisions.get(storage.root) is None or decisions[storage.root].category.is_fixed
            unit = Unit(tied, Category.DENY if stays else min(categories, key=lambda category: category.strength))
        units.update(dict.fromkeys(unit.nodes, unit))
    for node, unit in units.items():
        for use in uses(node):
            source = units.get(producer(use.node))
            if source is not None and source is not unit and has_float32(use.node):
                unit.before.append(source)
                source.after.append(unit)
    return Units(units, storages, ports)


def _computes_apart(node: fx.Node, storage: AliasSet, decisions: Mapping[fx.Node, Decision]) -> bool:
    """True if ``node`` makes the storage and may run in another precision than it is stored in."""
    return node is storage.root and not decisions[node].category.is_free
