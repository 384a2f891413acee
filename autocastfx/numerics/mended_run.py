"""The values that a converted model has once the nodes that overflow run in float32, during a paired run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.graph.alias import mutated_inputs
from autocastfx.graph.node import is_cast
from autocastfx.numerics.paired_run import PairedRun, Step


@dataclass(frozen=True)
class MendedRun:
    """Gives nodes the values that they have once they run in float32; the run goes on with these values.

    A value that fits in the dtype in which the converted graph stores it is rounded to it, for its readers may stay in
    16 bits. A value that does not fit is kept in float32 as well: all that reads it has to run in float32.

    Attributes:
        run: of both graphs.
        beyond: by node whose value does not fit: its value in float32; None where that is not known.
    """

    run: PairedRun
    beyond: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])

    def reads_beyond(self, node: fx.Node) -> bool:
        """True if a value that ``node`` reads does not fit in 16 bits."""
        return not self.beyond.keys().isdisjoint(node.all_input_nodes)

    def mend(self, step: Step) -> Any:
        """Set the value of a node that has just run to what it is in float32, and return it.

        Returns:
            None if that value is not known: then nothing is set.
        """
        node, env = step.node, self.run.low.env
        for gone in [one for one in self.beyond if one not in env]:  # no node reads it any more
            del self.beyond[gone]
        wide = self._in_float32(step)
        (ours, layout), theirs = pytree.tree_flatten(step.value), pytree.tree_leaves(wide)
        if not ours or [_shape(leaf) for leaf in ours] != [_shape(leaf) for leaf in theirs]:
            if self.reads_beyond(node) and step.twin is None:
                self.beyond[node] = None
            return None
        stored = [_stored_as(a, b) for a, b in zip(ours, theirs, strict=True)]
        pairs = [(narrow, b) for narrow, b in zip(stored, theirs, strict=True) if _is_float(narrow)]
        if any(bool((~narrow.isfinite() & b.isfinite()).any()) for narrow, b in pairs):  # finite in float32 alone
            self.beyond[node] = wide
        value = pytree.tree_unflatten(stored, layout)
        if mutated_inputs(node):  # other nodes may read the same memory
            with torch.no_grad():
                return pytree.tree_map(_written, step.value, value)
        env[node] = value
        return value

    def _in_float32(self, step: Step) -> Any:
        """The value of a node in float32; None if it is not known."""
        node = step.node
        if step.twin is not None:
            return step.reference
        if is_cast(node):
            return self._read(node.all_input_nodes[-1])
        if all(entry.name != step.name for entry in self.run.variant.plan.nodes):
            return None
        reads = {read: pytree.tree_map(_wide, self._read(read)) for read in node.all_input_nodes}
        if any(value is None for value in reads.values()):
            return None
        # One operator that stands for several nodes of the float32 graph.
        args, kwargs = map_arg((node.args, node.kwargs), reads.__getitem__)
        with self.run.modes():
            return node.target(*args, **kwargs) if callable(node.target) else None

    def _read(self, node: fx.Node) -> Any:
        return self.beyond[node] if node in self.beyond else self.run.low.env[node]


def _shape(leaf: Any) -> Any:
    return leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.itemsize > 1


def _wide(leaf: Any) -> Any:
    return leaf.float() if _is_float(leaf) and leaf.itemsize == 2 else leaf


def _stored_as(ours: Any, theirs: Any) -> Any:
    """What float32 has, in the dtype of the converted graph; float8, which has scales beside it, is left as it is."""
    if isinstance(ours, torch.Tensor) and ours.dtype != theirs.dtype:
        return theirs.to(ours.dtype) if _is_float(ours) else ours
    return theirs


def _written(into: Any, value: Any) -> Any:
    return into.copy_(value) if isinstance(into, torch.Tensor) else value
