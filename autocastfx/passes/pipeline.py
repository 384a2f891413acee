"""The passes that every captured graph runs through, in order, and the conversion of a graph by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn

from autocastfx.capture.tidy import no_op_source
from autocastfx.dtypes import dtype_name
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import copy_graph, dtypes, elements, module_path, origin, stand_for
from autocastfx.graph.walk import converted_inside, key_of, values_given
from autocastfx.passes.align import Align
from autocastfx.passes.analysis.exact_numbers import HeldValues, cast_once, fixed_facts
from autocastfx.passes.analysis.node_errors import NodeEffectMap
from autocastfx.passes.analysis.place_cheaply import CAST
from autocastfx.passes.decide.checks import Classify
from autocastfx.passes.float8 import UseFloat8, check_float8
from autocastfx.passes.insert_casts import DropLossCasts, InsertCasts, StoreWeights
from autocastfx.passes.place import Placer
from autocastfx.passes.recompose import GroupHeads, MergeRepeated, Recompose, RecomputeAttention, WriteOut
from autocastfx.passes.saved import choose_saved
from autocastfx.passes.state import Classification, Pass, Settings, State
from autocastfx.passes.torch_autocast.expand import expand
from autocastfx.passes.torch_autocast.insert_casts import Follow, InsertFollowedCasts, dispatch_of
from autocastfx.passes.verify import Verify
from autocastfx.passes.widen import InsertWidenings, WidenNodes
from autocastfx.plan.plan import (
    Plan,
    PlannedCast,
    PlannedCopy,
    PlannedNode,
    PlannedQuantized,
    Precision,
    Recomposed,
    Traffic,
)
from autocastfx.plan.sensitivity import Signature, added, rms
from autocastfx.policy.float8 import Layout
from autocastfx.runtime.operators.casts import saturating_cast
from autocastfx.runtime.operators.float8 import quantize
from autocastfx.runtime.working_copies import quantized_copy, working_copy

PIPELINE: tuple[type[Pass], ...] = (
    *(Recompose, WriteOut, RecomputeAttention, GroupHeads, MergeRepeated, DropLossCasts),
    *(Classify, Placer),
    *(InsertCasts, UseFloat8, StoreWeights, Align, Verify),
)
# For a list with ``placement: follow``, on a graph whose composites are expanded: torch.autocast recomposes nothing.
FOLLOW_PIPELINE: tuple[type[Pass], ...] = (
    *(Classify, Follow),
    *(InsertFollowedCasts, StoreWeights, Verify),
)
# For a model whose parameters are 16-bit already.
WIDEN_PIPELINE: tuple[type[Pass], ...] = (WidenNodes, InsertWidenings, Verify)


@dataclass(frozen=True)
class Converter(Settings):
    """The settings of one conversion, applicable to any number of captured graphs."""

    as_captured: bool = False  # graphs stay as they are
    fuse: str = "none"  # how what is converted runs between products

    def fixed_facts(self, tensor: torch.Tensor) -> tuple[object, ...]:
        """What decisions may rest on as long as the numbers of a tensor stay that no optimizer changes."""
        return () if self.as_captured or self.op_list.placement == "follow" else fixed_facts(tensor)

    def convert_graph(
        self,
        graph: fx.Graph,
        attributes: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        mode: str,
        rewrites: bool = True,
        prefix: str = "",
    ) -> ConvertedGraph:
        """Convert a copy of ``graph``.

        Args:
            graph: of ATen operators with abstract values; ``get_attr`` nodes read ``tensors`` and ``attributes``.
            attributes: constants and sub-graphs by target.
            tensors: parameters and buffers by target.
            device: where the graph will run.
            mode: of the ranges that hold, ``"train"`` or ``"eval"``.
            rewrites: False for the decisions alone, in a graph that cannot run and a plan without casts and copies.
            prefix: of the names in the plan, for a graph that another runs.

        Raises:
            BannedOpError: the list bans an op.
            OpListError, UnsupportedError: the list's float8 rules cannot be followed.
            PlanError: the plan given asks for what cannot be.
            VerifyError: the rewritten graph is not what was planned.
        """
        if self.as_captured:
            plan = Plan(self.low_name, device.type, self.op_list.name, (), ())
            return ConvertedGraph(copy_graph(graph), attributes, plan)
        settings = replace(self, device=device.type, mode=mode)
        if self.op_list.float8:
            check_float8(settings, device)
        parts = _Parts()
        made, values = _converted(settings, graph, attributes, tensors, parts, prefix, rewrites=rewrites)
        keeps_saved = self.op_list.saved and rewrites and mode != "eval" and not prefix
        trained = {name: t.requires_grad for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        plan = Plan(
            *(self.low_name, device.type, self.op_list.name),
            *(tuple(parts.nodes), tuple(parts.casts), parts.traffic),
            recomposed=tuple(parts.recomposed),
            copies=tuple(_planned_copies(made)),
            error=self.prices.sensitivity.error(parts.effects) if self.prices and parts.is_measured else None,
            quantized=tuple(parts.quantized),
            saved=choose_saved(made, trained, settings.matcher, self.facts, parts.known) if keeps_saved else (),
        )
        return ConvertedGraph(made, values, plan)


@dataclass(frozen=True)
class ConvertedGraph:
    """A converted graph, the values of its ``get_attr`` nodes but parameters and buffers, and the plan."""

    graph: fx.Graph
    attributes: Mapping[str, Any]
    plan: Plan


@dataclass
class _Parts:
    """The parts of a plan, to which each graph adds its own, sub-graphs first."""

    nodes: list[PlannedNode] = field(default_factory=list[PlannedNode])
    casts: list[PlannedCast] = field(default_factory=list[PlannedCast])
    recomposed: list[Recomposed] = field(default_factory=list[Recomposed])
    quantized: list[PlannedQuantized] = field(default_factory=list[PlannedQuantized])
    traffic: Traffic = field(default_factory=Traffic)
    effects: list[Signature] = field(default_factory=list[Signature])
    is_measured: bool = False
    known: Classification = field(default_factory=lambda: Classification({}, frozenset()))  # of the outermost graph


def _unfollowed(graph: fx.Graph) -> fx.Graph:
    """Drop casts to the dtype of another value that change nothing, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and (source := no_op_source(node)) is not None:
            node.replace_all_uses_with(source)
            stand_for(source, node.name)
            graph.erase_node(node)
    return graph


def _converted(
    settings: Settings,
    source: fx.Graph,
    attributes: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    parts: _Parts,
    prefix: str = "",
    given: Mapping[str, tuple[str, ...]] | None = None,
    *,
    rewrites: bool,
) -> tuple[fx.Graph, dict[str, Any]]:
    """A converted copy of ``source`` and the values of its ``get_attr`` nodes; its part of the plan is in ``parts``."""
    follows = settings.op_list.placement == "follow"
    graph = expand(source, dispatch_of(settings, source)) if follows else _unfollowed(copy_graph(source))
    # what was measured of this graph's nodes
    values, inner = dict(attributes), replace(settings, keep_output_dtype=True)
    magnitudes = settings.ranges.magnitudes(settings.mode) if settings.ranges is not None else {}
    known = settings.prices.sensitivity.effects_in(settings.mode) if settings.prices is not None else {}
    errors = NodeEffectMap.of(graph, known, prefix, given)
    # sub-graphs first, each by itself: the graph around then knows their dtypes
    for node in graph.nodes:
        for target, module in converted_inside(node, attributes).items():
            names = {**dict(module.named_children()), **dict(module.named_buffers())}
            outer = {inner.name: errors.names(value) for inner, value in values_given(node, module.graph).items()}
            inside, held = _converted(
                *(inner, module.graph, names, {}, parts),
                prefix=f"{prefix}{target}/",
                given=outer,
                rewrites=rewrites,
            )
            values[target] = fx.GraphModule(held, inside)
    # the passes, one state after the other
    state = State(
        graph=graph,
        attributes=values,
        parameters=frozenset(n for n, t in tensors.items() if isinstance(t, nn.Parameter)),
        values=HeldValues.of({**tensors, **attributes}),
        dtypes={node: dtypes(node) for node in graph.nodes},
        ops={node: op_name(node) for node in graph.nodes},
        cached=cast_once(tensors),
        parameter_ids={name: id(t) for name, t in tensors.items() if isinstance(t, nn.Parameter)},
        measured={n: magnitudes[key] for n in graph.nodes if (key := key_of(n, prefix)) in magnitudes},
        errors=errors,
        prefix=prefix,
    )
    effects: Mapping[fx.Node, Signature] = {}
    for step in FOLLOW_PIPELINE if follows else WIDEN_PIPELINE if settings.is_low_model else PIPELINE:
        if step is UseFloat8 and not settings.op_list.float8:
            continue
        if step is Align and settings.device not in settings.facts.fast_multiples:
            continue
        before, state = state.placements, step(settings)(state)
        if state.placements is not before:  # later steps put casts between a node and what it reads
            effects = state.errors.of_nodes(state.placements)
            if not rewrites:
                break
    # predicted errors of products in float8
    if settings.prices is not None and state.float8:
        recipe = settings.prices.sensitivity.float8
        planned = {node: state.errors.with_errors(node, one, recipe) for node, one in state.float8.items()}
        in_float8 = {node: part for node, one in planned.items() if (part := state.errors.of_products(node, one))}
        state = replace(state, float8=planned)
        effects = {
            **effects,
            **{n: added([part, *([effects[n]] if n in effects else [])]) for n, part in in_float8.items()},
        }
    # this graph's entries of the plan
    computing = [node for node in state.dtypes if node.op in ("call_function", "call_method", "call_module")]
    parts.effects += effects.values()
    parts.is_measured |= bool(state.errors.effects)
    parts.nodes += [_planned_node(node, state, settings.dtype, prefix, effects.get(node, ())) for node in computing]
    parts.casts += _planned_casts(graph, prefix)
    parts.quantized += _planned_quantized(graph, prefix)
    parts.recomposed += [
        Recomposed(one.pattern, prefix + one.node, tuple(prefix + name for name in one.replaced))
        for one in state.recomposed
    ]
    parts.traffic += state.traffic
    parts.known = state.classification
    return graph, values


# The plan's entries of a converted graph: its nodes, the inserted casts, and the reads of working copies.


def _planned_node(
    node: fx.Node, state: State, dtype: Callable[[Precision], torch.dtype], prefix: str, effect: Signature = ()
) -> PlannedNode:
    """The plan's entry of a node of the graph before rewriting; ``effect`` is the one predicted for it."""
    placement, captured = state.placements[node], state.dtypes[node]
    after = tuple(dtype(placement.store) if d == torch.float32 else d for d in captured)
    if state.followed is not None:
        after = state.followed.dtypes[node]
    elif state.widened is not None:
        after = state.widened[node]
    return PlannedNode(
        name=prefix + node.name,
        op=state.ops[node],
        module=module_path(node),
        decision=state.classification.decisions[node],
        placement=replace(placement, because=placement.because.inside(prefix)),
        captured=_dtype_names(captured),
        dtype=_dtype_names(after),
        error=rms(effect) if effect else None,
        effect=effect,
        float8=state.float8.get(node),
    )


def _planned_quantized(graph: fx.Graph, prefix: str) -> list[PlannedQuantized]:
    """The float8 values in a rewritten graph."""
    return [
        PlannedQuantized(
            name=prefix + node.name,
            value=prefix + mark.value,
            layout=Layout(mark.rule),
            readers=tuple(prefix + reader.name for reader in node.users),
        )
        for node in graph.nodes
        if node.target in (quantize, quantized_copy) and (mark := origin(node)) is not None
    ]


def _planned_casts(graph: fx.Graph, prefix: str) -> list[PlannedCast]:
    """The casts in a rewritten graph."""
    casts = ("to", of_function(saturating_cast))
    made = [(n, mark) for n in graph.nodes if (mark := origin(n)) is not None and op_name(n) in casts]
    return [
        PlannedCast(
            name=prefix + node.name,
            value=prefix + mark.value,
            dtype=_dtype_names(dtypes(node)),
            readers=tuple(prefix + reader.name for reader in node.users),
            saturates=mark.saturates,
            bytes=CAST * elements(node, *dtypes(node)),
        )
        for node, mark in made
    ]


def _planned_copies(graph: fx.Graph) -> list[PlannedCopy]:
    """The reads of working copies in a rewritten graph."""
    return [
        PlannedCopy(
            name=node.name,
            parameter=str(cast("fx.Node", node.args[1]).target),
            dtype=_dtype_names(dtypes(node)),
            readers=tuple(reader.name for reader in node.users),
        )
        for node in graph.nodes
        if node.target is working_copy
    ]


def _dtype_names(value_dtypes: tuple[torch.dtype, ...]) -> str:
    return ",".join(dtype_name(d) for d in value_dtypes)
