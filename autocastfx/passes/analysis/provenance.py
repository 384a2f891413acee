"""Where the values of a graph come from: a parameter, outside of the model, or an op that computes in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets
from autocastfx.graph.magnitude import read_as_scores, takes_mask
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import has_float32, producer, tensors, uses
from autocastfx.passes.analysis.ports import Ports
from autocastfx.passes.analysis.units import Unit, Units
from autocastfx.policy.rule import Category

__all__ = ["Provenance", "decisive"]


@dataclass(frozen=True)
class Provenance:
    """Float32 values by where they come from.

    Attributes:
        parameters: parameters and views of them. Weights are trained to be rounded; torch.autocast casts them too.
        outside: inputs, buffers, constants, what is made from no float32 value (``arange``, a cast from integers), and
            all that free ops compute with one of these: positions, states, accumulators. The rows that an embedding
            picks out of a parameter are not among them, nor are scores to which a mask was added.
        sizes_known: false for a graph made without inputs.
    """

    parameters: frozenset[fx.Node]
    outside: frozenset[fx.Node]
    sizes_known: bool = True

    def read_by(self, unit: Unit, units: Units) -> Iterator[fx.Node]:
        """The float32 operands that make a unit float32."""
        return (read for node in unit.nodes for read in decisive(node, units.ports, self.outside))

    @classmethod
    def of(cls, graph: fx.Graph, units: Units, parameters: frozenset[str], *, sizes_known: bool = True) -> Provenance:
        """The provenance of each float32 value of ``graph``.

        Args:
            graph: captured, with abstract values.
            units: of the same graph; a storage that is written into has one provenance.
            parameters: ``get_attr`` targets.
            sizes_known: false for a graph made without inputs, whose values are stand-ins of one element.
        """
        written = alias_sets(graph).keys()
        held: set[fx.Node] = set()
        outside: set[fx.Node] = set()
        for node in graph.nodes:
            if not has_float32(node):
                continue
            unit = units.of.get(producer(node))
            if unit is None:
                (held if node.op == "get_attr" and str(node.target) in parameters else outside).add(node)
                continue
            reads = list(decisive(node, units.ports, outside))
            if unit.category is Category.CLEAR and reads and held.issuperset(reads):
                held.add(node)
            elif unit.category is Category.KEEP:
                outside.update([node] if not reads or not held.issuperset(reads) else [])
            elif unit.is_free and not outside.isdisjoint(reads) and not _adds_mask(node, outside, written):
                outside.add(node)
        return cls(frozenset(held), frozenset(outside), sizes_known)


def _adds_mask(node: fx.Node, outside: Set[fx.Node], written: Set[fx.Node]) -> bool:
    """True if ``node`` adds what comes from outside to scores that a softmax alone reads."""
    others = [u for u in uses(node) if u.node not in outside and has_float32(u.node)]
    masks = [u for u in uses(node) if u.node in outside]
    is_mask = bool(others) and all(takes_mask(node, u) for u in masks)
    return is_mask and bool(node.users) and bool(read_as_scores(node, written))


def decisive(node: fx.Node, ports: Ports, outside: Set[fx.Node]) -> Iterator[fx.Node]:
    """The float32 operands that make ``node`` float32 by torch's promotion: those with dimensions.

    A single number widens nothing, but one that comes from ``outside`` and is added: 80 metres and a correction have no
    digits for the correction in 16 bits.
    """
    made_by = producer(node)
    is_sum = ports.facts.whole_numbers.get(base_name(op_name(made_by))) == "added"
    for use in uses(made_by):
        if has_float32(use.node) and not ports.stays_float32(made_by, use):
            is_number = not any(t.ndim for t in tensors(use.node) if t.dtype == torch.float32)
            if not is_number or (is_sum and use.node in outside):
                yield use.node
