"""The inputs of a node that are not cast to the precision that it runs in: one answer for all passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.graph.alias import mutated_inputs
from autocastfx.graph.names import base_name, kernel_name, op_name
from autocastfx.graph.node import Use, argument, dtypes, elements, is_float32, tensors, uses
from autocastfx.passes.analysis.cross_entropy import is_over_classes
from autocastfx.plan.plan import Placement, Precision
from autocastfx.policy.kernel_facts import PARAMETERS, KernelFacts
from autocastfx.policy.op_list import OpList
from autocastfx.runtime.operators.norms import layer_norm

__all__ = ["Ports"]

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
        found = _OURS.get(node.target)
        return found if found is not None and found._schema.name in self._float32_parameters else None

    def kernel(self, node: fx.Node) -> str:
        """Return the ``kernel_name`` under which kernel facts list ``node``, where it runs low."""
        found = self.stand_in(node)
        return kernel_name(node) if found is None else str(found._schema.name)

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
        return _with_dimensions(self.operands(node))

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
        found = {node: self.as_stored(node, placements) for node in nodes}
        cast: set[fx.Node] = set()
        for node, taken in found.items():
            if node in placements and placements[node].run is Precision.FLOAT32:
                cast.update(u.node for u in uses(node) if u.argument not in taken and u.node not in written)
        for node, taken in found.items():
            if taken and placements[node].run is Precision.FLOAT32 and not self.asks_dtype(node):
                shared = {u.argument for u in uses(node) if u.node in cast}
                found[node] = tuple(name for name in taken if name not in shared)
        return found

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
        decisive = _with_dimensions(operands)
        if placement.run is Precision.LOW:
            found = set(operands) - set(decisive)
        else:
            found = {r for r in operands if r in placements and placements[r].store is Precision.LOW}
            if all(r in found for r in decisive):
                found.discard(min(decisive, key=elements))
        return tuple(u.argument for u in uses(node) if u.node in found)

    def written(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values that ``node`` writes into and that share its precision (batch_norm's statistics do not)."""
        mutated = mutated_inputs(node)
        kept = {u.node for u in uses(node) if self.stays_float32(node, u)} if mutated else ()
        return tuple(n for n in mutated if n not in kept)


def _with_dimensions(operands: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """The operands that have dimensions; all of them if none has."""
    return tuple(r for r in operands if tensors(r)[0].ndim) or operands
