"""The pass that puts casts into a graph, where a value's stored precision is not the one that its reader runs in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autocastfx.dtypes import dtype_name
from autocastfx.graph.alias import alias_sets, is_opaque, moves_each_once
from autocastfx.graph.node import (
    Origin,
    Use,
    all_names,
    argument,
    is_float32,
    map_uses,
    origin,
    place_like,
    set_argument,
    set_origin,
    set_value,
    stand_for,
    tensors,
    value,
)
from autocastfx.passes.analysis.units import Ports, is_over_classes, read_low
from autocastfx.passes.analysis.value_ranges import Fill, is_mask, largest_mask, seen_as
from autocastfx.passes.patterns.patterns import LOSS_CAST
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Placement, Precision, Recomposed, Why
from autocastfx.policy.rule import Category
from autocastfx.runtime.operators.casts import cast_if, saturating_cast
from autocastfx.runtime.working_copies import ATTRIBUTE, working_copy

__all__ = ["DropLossCasts", "InsertCasts", "MakeConditional", "Rewriter", "StoreWeights", "read_copies"]


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
            set_argument(node, fill.argument, math.copysign(largest_mask(self.policy.low), fill.number))
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
            return largest_mask(self.policy.low)
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


# Takes out the model's own casts to float32 of scores for a cross entropy that is float32 by its list, in place.
#
# The list makes that cast in any case, and the operator can do so itself: then no float32 copy of the scores is
# there.


def drop_loss_casts(graph: fx.Graph, category: Callable[[fx.Node], Category | None]) -> tuple[Recomposed, ...]:
    """Let each such cross entropy read, through what lies between them and only moves values, what the cast read.

    A cast stays that anything else reads, that changes more than the dtype, or that the list bans or keeps; all stay
    where the list lets the cross entropy run in 16 bits.

    Args:
        graph: captured, with abstract values.
        category: of a node, by the list.
    """
    losses = [node for node in graph.nodes if is_over_classes(node) and category(node) is Category.DENY]
    written = alias_sets(graph).keys() if losses else ()
    found: list[Recomposed] = []
    for loss in losses:
        node = argument(loss, "self")
        while len(node.users) == 1 and node not in written and (_is_plain_cast(node) or moves_each_once(node)):
            source = node.all_input_nodes[0]
            if _is_plain_cast(node):
                if not is_float32(source) or category(node) in (Category.BAN, Category.KEEP):
                    break
                found.append(Recomposed(LOSS_CAST, loss.name, (node.name,)))
                node.replace_all_uses_with(source)
                stand_for(source, *all_names(node))
                graph.erase_node(node)
            node = source
    return tuple(found)


def _is_plain_cast(node: fx.Node) -> bool:
    is_cast = node.target is torch.ops.aten.to.dtype
    return is_cast and argument(node, "dtype") == torch.float32 and argument(node, "memory_format") is None


class DropLossCasts(Pass):
    """Drops the model's own casts to float32 before a cross entropy."""

    name = "drop loss casts"

    def __call__(self, state: State) -> State:
        """The state with what was dropped."""
        if LOSS_CAST not in self.policy.recompose:
            return state
        found = drop_loss_casts(state.graph, self.policy.category)
        return state.with_recomposed((*state.recomposed, *found)) if found else state


# The last step for a graph made without inputs: casts of values whose dtype is not known touch only what they mean.


def make_conditional(
    graph: fx.Graph, placements: Mapping[fx.Node, Placement], guesses: Set[str], low: torch.dtype
) -> None:
    """Give the nodes of ``graph`` the dtypes that the plan says, and make a cast of a guessed value conditional.

    Args:
        graph: rewritten; changed in place.
        placements: of the captured nodes.
        guesses: names of the captured nodes that were taken for float32 without being known to be.
        low: the 16-bit dtype.
    """
    for node in graph.nodes:
        mark, placement = origin(node), placements.get(node)
        if mark is not None:
            if isinstance(dtype := node.args[1], torch.dtype):
                set_value(node, torch.empty(1, dtype=dtype))
                if mark.value in guesses:  # clamping an integer would make it a float
                    source = torch.float32 if dtype == low else low
                    node.target, node.args = cast_if, (node.all_input_nodes[0], source, dtype)
            else:
                set_value(node, value(node.all_input_nodes[0]))
        elif placement is not None and placement.run is Precision.LOW:
            set_value(node, pytree.tree_map(partial(_narrowed, low), value(node)))
    for node in reversed(list(graph.nodes)):
        if origin(node) is not None and not node.users:
            graph.erase_node(node)
    graph.lint()


def _narrowed(low: torch.dtype, leaf: object) -> object:
    return leaf.to(low) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf


class MakeConditional(Pass):
    """Makes casts of guessed values conditional, in a graph made without inputs."""

    name = "make conditional"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        if state.guesses is not None:
            make_conditional(state.graph, state.placements, state.guesses, self.policy.low)
        return state


# Where 16-bit weights come from without a cast in each call: from working copies, or from parameters stored low.


def read_copies(graph: fx.Graph, parameters: frozenset[str], placements: Mapping[fx.Node, Placement]) -> None:
    """Replace the casts of parameters to 16 bits by reads of working copies, in place.

    A view that that is low has a read of its own, as it had a cast of its own. Copies are looked at
    anew after whatever may have changed a parameter unseen.
    """
    copies: fx.Node | None = None
    casts = set(_casts(graph, parameters))
    for cast_node in list(graph.nodes):
        copies = None if is_opaque(cast_node) else copies
        if cast_node not in casts:
            continue
        master, dtype = cast_node.args[:2]
        if copies is None:
            with graph.inserting_before(cast_node):
                copies = graph.create_node("get_attr", ATTRIBUTE)
        causes = {reader: placements[reader].because.why for reader in cast_node.users if reader in placements}
        apart = [reader for reader in cast_node.users if causes.get(reader) is Why.VIEW_OF_WEIGHT]
        shared = [reader for reader in cast_node.users if reader not in apart]
        apart = apart if shared else apart[1:]
        cast_node.target, cast_node.args = working_copy, (copies, master, dtype)
        set_origin(cast_node, Origin("store_weights", "working copy", cast("fx.Node", master).name))
        for reader in apart:
            with graph.inserting_before(reader):
                made = graph.create_node("call_function", working_copy, cast_node.args, {}, cast_node.name)
            made.meta.update(cast_node.meta)
            reader.replace_input_with(cast_node, made)


def store_low(graph: fx.Graph, tensors_of: Mapping[str, int], low: torch.dtype) -> None:
    """Take parameters as stored in 16 bits, in place: those that every reader casts to 16 bits.

    Args:
        graph: rewritten.
        tensors_of: the names of parameters, each with a number that tied ones share.
        low: the 16-bit dtype.
    """
    casts = set(_casts(graph, frozenset(tensors_of)))
    groups: dict[int, list[fx.Node]] = {}
    for node in (n for n in graph.nodes if n.op == "get_attr" and n.target in tensors_of):
        groups.setdefault(tensors_of[str(node.target)], []).append(node)
    for nodes in groups.values():
        if all(node.users and casts.issuperset(node.users) for node in nodes):
            for node in nodes:
                for cast_node in list(node.users):
                    cast_node.replace_all_uses_with(node)
                    graph.erase_node(cast_node)
                for abstract in tensors(node):
                    set_value(node, abstract.to(low))


def _casts(graph: fx.Graph, parameters: frozenset[str]) -> Iterator[fx.Node]:
    """The casts to 16 bits that a pass put directly after a parameter, for all that read it low."""
    for node in graph.nodes:
        mark = origin(node)
        if mark is None or mark.rule not in ("reader", "parameter") or node.target is not _TO:
            continue
        source, dtype = node.args[:2]
        is_weight = isinstance(source, fx.Node) and source.op == "get_attr" and source.target in parameters
        if is_weight and dtype != torch.float32:
            yield node


class StoreWeights(Pass):
    """Reads 16-bit weights where ``weights="cached"`` or ``weights="low"`` keeps them."""

    name = "store weights"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        if self.policy.weights == "cached":
            read_copies(state.graph, state.parameters, state.placements)
        elif self.policy.weights == "low":
            store_low(state.graph, state.parameter_ids, self.policy.low)
        return state
