"""The pass that puts casts into a graph, where a value's stored precision is not the one that its reader runs in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, is_opaque, moves_each_once
from autocastfx.graph.node import (
    Origin,
    Use,
    all_names,
    argument,
    is_float32,
    origin,
    set_argument,
    set_origin,
    set_value,
    stand_for,
    tensors,
    value,
)
from autocastfx.passes.analysis.units import Ports, is_over_classes, read_low
from autocastfx.passes.analysis.value_ranges import is_mask, largest_mask, seen_as
from autocastfx.passes.casts import CastStyle, PlannedDtypes, insert_casts
from autocastfx.passes.patterns.patterns import LOSS_CAST
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import Placement, Precision, Recomposed, Why
from autocastfx.policy.rule import Category
from autocastfx.runtime.operators.float8 import quantize
from autocastfx.runtime.working_copies import ATTRIBUTE, quantized_copy, working_copy


class InsertCasts(Pass):
    """Puts the casts in that the placements ask for.

    Where a node runs otherwise than it was captured, it calls another operator, or with other arguments.
    """

    name = "insert casts"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        graph, classification = state.graph, state.classification
        ports, low, rounds = self.settings.ports, self.settings.low, self.settings.fold == "kernel"
        written = alias_sets(graph, ports.written).keys()
        changing = {node for node in state.placements if not written.isdisjoint(node.all_input_nodes)}
        bounds = Bounds.of(graph, classification.wide, state.parameters)
        runs_low = {node for node, placement in state.placements.items() if placement.run is Precision.LOW}
        readers = self.settings.readers(graph, classification.decisions, runs_low.__contains__)
        insert_casts(graph, self._planned(state), CastStyle("rewrite", low, written, bounds, readers))
        for node, placement in state.placements.items():
            if placement.run is Precision.LOW:
                if (stand_in := ports.stand_in(node)) is not None:
                    node.target = stand_in
                if (fill := classification.fills.get(node)) is not None:
                    set_argument(node, fill.argument, math.copysign(largest_mask(low), fill.number))
            elif placement.as_stored and ports.asks_dtype(node):
                if argument(node, "dtype") is None:  # else the model says which
                    set_argument(node, "dtype", torch.float32)
            elif placement.as_stored and is_over_classes(node):
                read_low(node, rounds=rounds, recomputes=node not in changing)
        return replace(state, planned=self._planned)

    def _planned(self, state: State) -> PlacedDtypes:
        settings = self.settings
        return PlacedDtypes(state.placements, state.dtypes, settings.dtype, settings.ports, settings.keep_output_dtype)


@dataclass(frozen=True)
class PlacedDtypes(PlannedDtypes):
    """The dtypes of a float32 model that placements bring to 16 bits in part.

    Attributes:
        placements: one for every ``call_*`` node.
        captured: dtypes before casts were put in.
        dtype: the dtype of a precision.
        ports: which inputs of a low node are not cast.
        keep_output_dtype: cast the graph's outputs back to their captured dtype.
    """

    placements: Mapping[fx.Node, Placement]
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]]
    dtype: Callable[[Precision], torch.dtype]
    ports: Ports
    keep_output_dtype: bool = True

    def read(self, node: fx.Node, use: Use, source: fx.Node) -> torch.dtype | None:
        """The dtype of the precision that ``node`` runs in, for float32 values that it does not take as stored."""
        if self.captured.get(source) != (torch.float32,) or not isinstance(value(source), torch.Tensor):
            return None
        if node.op == "output":
            return torch.float32 if self.keep_output_dtype else None
        placement = self.placements.get(node)
        if placement is None:
            return torch.float32
        if use.argument in placement.as_stored:
            return None
        to = self.dtype(placement.run)
        return torch.float32 if to != torch.float32 and self.ports.stays_float32(node, use) else to

    def gives(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        """The captured dtypes, but that of the precision that ``node`` runs in instead of float32."""
        placement = self.placements.get(node)
        return self.captured.get(node, ()) if placement is None else self._in(placement.run, node)

    def stores(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        """Likewise, of the precision that its value is stored in, where it has one."""
        placement = self.placements.get(node)
        is_one = placement is not None and isinstance(value(node), torch.Tensor)
        return self._in(placement.store, node) if placement is not None and is_one else self.gives(node)

    def _in(self, precision: Precision, node: fx.Node) -> tuple[torch.dtype, ...]:
        to = self.dtype(precision)
        return tuple(to if dtype == torch.float32 else dtype for dtype in self.captured[node])


@dataclass(frozen=True)
class Bounds:
    """Where casts of values saturate that come from outside of the graph, or are beyond the range.

    Attributes:
        wide: values that hold finite numbers beyond the low dtype's range.
        outside: what inputs and constants reach without being computed with.
        masks: those that mask.
    """

    wide: Set[fx.Node]
    outside: Set[fx.Node]
    masks: Set[fx.Node]

    @staticmethod
    def of(graph: fx.Graph, wide: Set[fx.Node], parameters: Set[str]) -> Bounds:
        """Find them; ``get_attr`` targets in ``parameters`` are cast without saturation."""
        constants = (n for n in graph.nodes if n.op == "get_attr" and str(n.target) not in parameters)
        outside = seen_as((*(n for n in graph.nodes if n.op == "placeholder"), *constants))
        return Bounds(wide, outside, {n for n in outside if is_mask(n)})

    def __call__(self, read: fx.Node, to: torch.dtype) -> float | None:
        """The magnitude at which a cast of ``read`` to ``to`` saturates finite values; None for a plain cast."""
        if torch.finfo(to).bits >= torch.finfo(torch.float32).bits:
            return None
        if read in self.wide or read in self.masks:
            return largest_mask(to)
        return float(torch.finfo(to).max) if read in self.outside and to == torch.float16 else None


class DropLossCasts(Pass):
    """Drops the model's own casts to float32 of scores for a cross entropy that is float32 by its list.

    The list makes that cast in any case, and the operator can do so itself: then no float32 copy of the scores is
    there. The cross entropy reads, through what lies between them and only moves values, what the cast read. A cast
    stays that anything else reads, that changes more than the dtype, or that the list bans or keeps; all stay where the
    list lets the cross entropy run in 16 bits.
    """

    name = "drop loss casts"

    def __call__(self, state: State) -> State:
        """The state with what was dropped."""
        if LOSS_CAST not in self.settings.recompose:
            return state
        category = self.settings.category
        over_classes = [(node, category(node)) for node in state.graph.nodes if is_over_classes(node)]
        losses = [node for node, listed in over_classes if listed is not None and listed.is_float32]
        written = alias_sets(state.graph).keys() if losses else ()
        dropped: list[Recomposed] = []
        for loss in losses:
            node = argument(loss, "self")
            while len(node.users) == 1 and node not in written and (_is_plain_cast(node) or moves_each_once(node)):
                source = node.all_input_nodes[0]
                if _is_plain_cast(node):
                    if not is_float32(source) or category(node) in (Category.BAN, Category.KEEP):
                        break
                    dropped.append(Recomposed(LOSS_CAST, loss.name, (node.name,)))
                    node.replace_all_uses_with(source)
                    stand_for(source, *all_names(node))
                    state.graph.erase_node(node)
                node = source
        return state.with_recomposed((*state.recomposed, *dropped)) if dropped else state


def _is_plain_cast(node: fx.Node) -> bool:
    is_cast = node.target is torch.ops.aten.to.dtype
    return is_cast and argument(node, "dtype") == torch.float32 and argument(node, "memory_format") is None


# Where 16-bit weights come from without a cast in each call: from working copies, or from parameters stored low.


def read_copies(graph: fx.Graph, parameters: frozenset[str], placements: Mapping[fx.Node, Placement]) -> None:
    """Replace the casts of parameters to 16 bits by reads of working copies, in place; so too what quantises them.

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
        _read_quantized(cast_node, cast_node)


def _read_quantized(copy: fx.Node, low: fx.Node) -> None:
    """Let what quantises a working copy, or that transposed (``low``), read it as quantised once."""
    for reader in list(low.users):
        if reader.target is quantize:
            reader.target, reader.args = quantized_copy, (*copy.args[:2], *reader.args)
        elif low is copy and reader.target is torch.ops.aten.t.default:
            _read_quantized(copy, reader)


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
        if mark is None or mark.rule not in ("reader", "parameter") or node.target is not torch.ops.aten.to.dtype:
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
        if self.settings.weights == "cached":
            read_copies(state.graph, state.parameters, state.placements)
        elif self.settings.weights == "low":
            store_low(state.graph, state.parameter_ids, self.settings.low)
        return state
