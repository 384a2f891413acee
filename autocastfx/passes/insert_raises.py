"""The pass that widens what raised nodes of a 16-bit model read, and rounds what they give to others."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import (
    Origin,
    argument,
    dtypes,
    map_uses,
    origin,
    place_like,
    set_argument,
    set_origin,
    value,
)
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Placement, Precision

__all__ = ["InsertRaises", "insert_raises"]

_TO = torch.ops.aten.to.dtype


def insert_raises(
    graph: fx.Graph, placements: Mapping[fx.Node, Placement], low: torch.dtype, *, keep_output_dtype: bool
) -> None:
    """Insert casts into ``graph``, in place: one for each value and dtype.

    Args:
        graph: captured, with abstract values.
        placements: one for every ``call_*`` node.
        low: the 16-bit dtype of the model.
        keep_output_dtype: cast raised outputs back to it.
    """
    run = _Run(graph, placements, low, keep_output_dtype, alias_sets(graph).keys())
    for node in list(graph.nodes):
        run.visit(node)


@dataclass
class _Run:
    graph: fx.Graph
    placements: Mapping[fx.Node, Placement]
    low: torch.dtype
    keep_output_dtype: bool
    written: Set[fx.Node]
    casts: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])  # value → it in its other dtype

    def visit(self, node: fx.Node) -> None:
        if origin(node) is not None:  # a cast of an earlier run
            return
        placement = self.placements.get(node)
        is_wide = self._is_wide(node)
        own: dict[fx.Node, fx.Node] = {}  # casts for this reader alone

        def wanted(name: str, read: fx.Node) -> fx.Node:
            as_stored = placement.as_stored if placement is not None else ()
            is_one = isinstance(value(read), torch.Tensor) and dtypes(read) == (self.low,)
            goes_out = node.op == "output" and not self.keep_output_dtype
            if not is_one or goes_out or name in as_stored or self._is_wide(read) == is_wide:
                return read
            made = own if read in self.written else self.casts
            if read not in made:
                made[read] = self._cast(read, torch.float32 if is_wide else self.low, node)
            return made[read]

        map_uses(node, wanted)
        if is_wide and placement is not None and argument(node, "dtype") == self.low:  # a cast of the model
            set_argument(node, "dtype", torch.float32)

    def _is_wide(self, node: fx.Node) -> bool:
        placement = self.placements.get(node)
        return placement is not None and placement.store is Precision.FLOAT32

    def _cast(self, read: fx.Node, to: torch.dtype, reader: fx.Node) -> fx.Node:
        by_reader = read.op in ("placeholder", "get_attr") or read in self.written
        with self.graph.inserting_before(reader if by_reader else read.next):
            made = self.graph.create_node("call_function", _TO, (read, to), {}, f"{read.name}_{dtype_name(to)}")
        place_like(made, read)
        set_origin(made, Origin("rewrite", "mutated" if read in self.written else "reader", read.name))
        return made


class InsertRaises(Pass):
    """Puts the casts in that raised nodes need."""

    name = "insert raises"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        insert_raises(
            *(state.graph, state.placements, self.policy.low), keep_output_dtype=self.policy.keep_output_dtype
        )
        return state
