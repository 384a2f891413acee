"""The pass that puts casts into a graph, where a value's stored precision is not the one that its reader runs in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import (
    Origin,
    Use,
    argument,
    is_float32,
    map_uses,
    place_like,
    set_argument,
    set_origin,
)
from autocastfx.passes.analysis.cross_entropy import is_over_classes, read_low
from autocastfx.passes.analysis.masks import Fill, fits, is_mask, seen_as
from autocastfx.passes.analysis.ports import Ports
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Placement, Precision
from autocastfx.runtime.operators.casts import saturating_cast

__all__ = ["InsertCasts", "Rewriter"]

_TO = torch.ops.aten.to.dtype


@dataclass(frozen=True)
class Rewriter:
    """Writes casts.

    Attributes:
        low: the 16-bit dtype.
        ports: which inputs of a low node are not cast.
        keep_output_dtype: cast the graph's outputs back to their captured dtype.
        rounds: a cross entropy of 16-bit logits rounds what it keeps for backward.
    """

    low: torch.dtype
    ports: Ports
    keep_output_dtype: bool = True
    rounds: bool = False

    def __call__(
        self,
        graph: fx.Graph,
        placements: Mapping[fx.Node, Placement],
        wide: frozenset[fx.Node],
        parameters: frozenset[str],
        fills: Mapping[fx.Node, Fill] = MappingProxyType({}),
    ) -> None:
        """Insert casts into ``graph``, in place.

        Args:
            graph: captured, with abstract values.
            placements: one for every ``call_*`` node.
            wide: values that hold finite numbers beyond the low dtype's range.
            parameters: ``get_attr`` targets that are parameters, which are cast without saturation.
            fills: nodes whose number becomes one that the low dtype has, where they run low.
        """
        run = _Run(self, graph, placements, wide, parameters, fills)
        for node in list(graph.nodes):
            run.visit(node)


@dataclass
class _Run:
    policy: Rewriter
    graph: fx.Graph
    placements: Mapping[fx.Node, Placement]
    wide: frozenset[fx.Node]
    parameters: frozenset[str]
    fills: Mapping[fx.Node, Fill]
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)
    mutated: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)  # casts for one reader, in one dtype
    stored: dict[fx.Node, fx.Node] = field(default_factory=dict)  # value → the cast that holds it as it is stored

    def __post_init__(self) -> None:
        self.storages = alias_sets(self.graph, self.policy.ports.written)
        self.outside = seen_as(n for n in self.graph.nodes if n.op == "placeholder" or self._is_constant(n))
        self.mask_like = {n for n in self.outside if is_mask(n)}

    def visit(self, node: fx.Node) -> None:
        placement = self.placements.get(node)
        runs_low = placement is not None and placement.run is Precision.LOW
        ports = self.policy.ports
        as_stored = placement.as_stored if placement is not None else ()
        is_written = any(read in self.storages for read in node.all_input_nodes)

        def wanted(argument: str, read: fx.Node) -> fx.Node:
            if not is_float32(read):
                return read
            if node.op == "output" and not self.policy.keep_output_dtype:
                return self.stored.get(read, read)
            if argument in as_stored:
                return self.stored.get(read, read)
            wants_low = runs_low and not ports.stays_float32(node, Use(argument, read))
            return self._as(Precision.LOW if wants_low else Precision.FLOAT32, read, node)

        map_uses(node, wanted)
        if runs_low and (stand_in := ports.stand_in(node)) is not None:
            node.target = stand_in
        if runs_low and node in self.fills:
            fill = self.fills[node]
            set_argument(node, fill.argument, math.copysign(fits(self.policy.low), fill.number))
        if as_stored and not runs_low and ports.asks_dtype(node):
            if argument(node, "dtype") is None:  # else the model says which
                set_argument(node, "dtype", torch.float32)
        elif as_stored and not runs_low and is_over_classes(node):
            read_low(node, rounds=self.policy.rounds, recomputes=not is_written)
        if placement is None or not is_float32(node):
            return
        if placement.run is not placement.store:
            self.stored[node] = self._cast(node, node, placement.store, "storage", before=node.next)

    def _as(self, precision: Precision, read: fx.Node, reader: fx.Node) -> fx.Node:
        """``read`` in ``precision``, for ``reader``: itself, an earlier cast of it, or a new one."""
        holder = self.stored.get(read, read)
        placement = self.placements.get(read)
        store = placement.store if placement is not None else Precision.FLOAT32
        if store is precision:
            return holder
        dtype = self._dtype(precision)
        if read in self.storages:  # its contents change: what this reader sees is what they are now
            if (read, reader) not in self.mutated:
                self.mutated[read, reader] = self._cast(read, holder, precision, "mutated", before=reader)
            return self.mutated[read, reader]
        if (read, dtype) not in self.casts:
            by_input = read.op in ("placeholder", "get_attr")
            before = reader if by_input else holder.next
            self.casts[read, dtype] = self._cast(read, holder, precision, "reader", before=before)
        return self.casts[read, dtype]

    def _dtype(self, precision: Precision) -> torch.dtype:
        return self.policy.low if precision is Precision.LOW else torch.float32

    def _cast(self, read: fx.Node, holder: fx.Node, precision: Precision, rule: str, *, before: fx.Node) -> fx.Node:
        bound = self._bound(read) if precision is Precision.LOW else None
        dtype = self._dtype(precision)
        mark = Origin("rewrite", rule, read.name, saturates=bound is not None)
        suffix = dtype_name(dtype)

        target, args = (_TO, (holder, dtype)) if bound is None else (saturating_cast, (holder, dtype, bound))
        with self.graph.inserting_before(before):
            made = self.graph.create_node("call_function", target, args, {}, f"{read.name}_{suffix}")
        place_like(made, read)
        set_origin(made, mark)
        return made

    def _is_constant(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and str(node.target) not in self.parameters

    def _bound(self, read: fx.Node) -> float | None:
        """The magnitude at which a narrowing cast of ``read`` saturates finite values; None for a plain cast."""
        if read in self.wide or read in self.mask_like:
            return fits(self.policy.low)
        saturates = read in self.outside and self.policy.low == torch.float16
        return float(torch.finfo(self.policy.low).max) if saturates else None


class InsertCasts(Pass):
    """Puts the casts in that the placements ask for."""

    name = "insert casts"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        policy, found = self.policy, state.classification
        rewriter = Rewriter(policy.low, policy.ports, policy.keep_output_dtype, rounds=policy.fold == "kernel")
        rewriter(state.graph, state.placements, found.wide, state.parameters, found.fills)
        return state
