"""Which inputs of a node that runs low are not cast: one answer for all passes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autocastfx.alias import mutated_inputs
from autocastfx.graph import Use, tensors, uses
from autocastfx.kernel_facts import KernelFacts
from autocastfx.op_list import OpList
from autocastfx.op_name import base_name, op_name

__all__ = ["Ports"]


@dataclass(frozen=True)
class Ports:
    """The rules of one conversion."""

    op_list: OpList
    facts: KernelFacts

    def stays_float32(self, node: fx.Node, use: Use) -> bool:
        """Whether the argument is one of the op's ``keep_args``."""
        return use.argument in self.op_list.kept(op_name(node))

    def stays_as_stored(self, node: fx.Node, use: Use) -> bool:
        """Whether the argument is a 0-d operand that the kernel takes in any precision, beside one with dimensions."""
        if base_name(op_name(node)) not in self.facts.mixes_scalars or any(t.ndim for t in tensors(use.node)):
            return False
        others = (t for u in uses(node) if u.node is not use.node for t in tensors(u.node))
        return any(t.ndim and t.is_floating_point() for t in others)

    def written(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values that ``node`` writes into and that share its precision (batch_norm's statistics do not)."""
        kept = {u.node for u in uses(node) if self.stays_float32(node, u)}
        return tuple(n for n in mutated_inputs(node) if n not in kept)
