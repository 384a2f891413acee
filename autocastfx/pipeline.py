"""The pipeline that every captured graph runs through: classify, place, rewrite, verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autocastfx.capture.export import Captured
from autocastfx.cast import cast_if
from autocastfx.graph import copy_graph, dtypes, module_path, origin, subgraphs
from autocastfx.kernel_facts import KernelFacts
from autocastfx.op_list import OpList
from autocastfx.op_name import of_function, op_name
from autocastfx.passes.classify import Classification, Classifier
from autocastfx.passes.place import place
from autocastfx.passes.rewrite import Rewriter
from autocastfx.passes.soften import soften
from autocastfx.passes.verify import verify
from autocastfx.plan import Placement, Plan, PlannedCast, PlannedNode, Precision
from autocastfx.ports import Ports
from autocastfx.variant import Variant

__all__ = ["LOW", "PIPELINE", "Converter", "State"]

LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Higher-order operators whose graphs are converted too; the values that cross their borders keep their captured dtype.
# Others stay whole: an autocast region has its own policy, and a region that switches autocast off asks for float32.
_CONVERTED_INSIDE = ("wrap_with_set_grad_enabled", "cond", "while_loop", "map_impl", "scan")


@dataclass(frozen=True)
class State:
    """What the passes hand on: a graph on its way, and all that is known of it so far."""

    graph: fx.Graph
    attributes: Mapping[str, Any]
    parameters: frozenset[str]
    largest: Mapping[str, float]
    dtypes: Mapping[fx.Node, tuple[torch.dtype, ...]]
    guesses: frozenset[str] | None = None
    classification: Classification = field(default_factory=lambda: Classification({}, frozenset()))
    placements: Mapping[fx.Node, Placement] = field(default_factory=dict)


@dataclass(frozen=True)
class Converter:
    """One conversion's policy, applicable to any number of captured graphs. Pickles."""

    op_list: OpList
    facts: KernelFacts
    low: torch.dtype
    keep_output_dtype: bool = True

    @property
    def ports(self) -> Ports:
        """Which inputs of a low node are not cast."""
        return Ports(self.op_list, self.facts)

    def __call__(self, captured: Captured, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Variant:
        """A variant made from ``captured``, for ``device``.

        Args:
            captured: stays as it is.
            tensors: parameters and buffers by name.
            device: where the graph will run.

        Raises:
            BannedOpError: the list bans an op.
            VerifyError: the rewritten graph is not what was planned.
        """
        draft = captured.guesses is not None
        policy = replace(self, op_list=self.op_list.lenient()) if draft else self
        graph, attributes, nodes, casts = policy._convert(
            captured.graph, captured.attributes, tensors, device, "", captured.guesses
        )
        plan = Plan(LOW[self.low], device.type, self.op_list.name, tuple(nodes), tuple(casts), unverified=draft)
        return Variant(
            graph=graph,
            attributes=attributes,
            plan=plan,
            out_spec=captured.out_spec,
            structure=captured.structure,
            guard=captured.guard,
            modes=captured.training,
            device=captured.device,
            captured=captured,
        )

    def _convert(
        self,
        source: fx.Graph,
        attributes: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        prefix: str,
        guesses: frozenset[str] | None = None,
    ) -> tuple[fx.Graph, dict[str, Any], list[PlannedNode], list[PlannedCast]]:
        graph = copy_graph(source)
        inner = replace(self, keep_output_dtype=True)
        converted: dict[str, Any] = dict(attributes)
        nodes: list[PlannedNode] = []
        casts: list[PlannedCast] = []
        for node in graph.nodes:
            held = subgraphs(node, attributes) if op_name(node) in _CONVERTED_INSIDE else {}
            for target, module in held.items():
                names = {**dict(module.named_children()), **dict(module.named_buffers())}
                inside = inner._convert(module.graph, names, {}, device, f"{prefix}{target}/")
                converted[target] = fx.GraphModule(inside[1], inside[0])
                nodes += inside[2]
                casts += inside[3]
        state = State(
            graph=graph,
            attributes=converted,
            parameters=frozenset(n for n, t in tensors.items() if isinstance(t, nn.Parameter)),
            largest=_largest({**tensors, **attributes}),
            dtypes={node: dtypes(node) for node in graph.nodes},
            guesses=guesses,
        )
        computing = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        for run in PIPELINE:
            state = run(self, state, device)
        nodes += [_planned(node, state, self.low, prefix) for node in computing]
        casts += _casts(graph, prefix)
        return graph, converted, nodes, casts


def _classify(converter: Converter, state: State, device: torch.device) -> State:
    classifier = Classifier(converter.op_list, converter.facts, converter.low, device.type)
    return replace(state, classification=classifier(state.graph, state.largest))


def _place(converter: Converter, state: State, device: torch.device) -> State:
    return replace(state, placements=place(state.graph, state.classification.decisions, converter.ports))


def _rewrite(converter: Converter, state: State, device: torch.device) -> State:
    rewriter = Rewriter(converter.low, converter.ports, converter.keep_output_dtype)
    rewriter(state.graph, state.placements, state.classification.wide, state.parameters)
    return state


def _verify(converter: Converter, state: State, device: torch.device) -> State:
    if state.guesses is not None:  # made without inputs: there is nothing to verify with
        soften(state.graph, state.placements, state.guesses, converter.low)
        return state
    verify(
        state.graph,
        state.placements,
        state.dtypes,
        low=converter.low,
        ports=converter.ports,
        keep_output_dtype=converter.keep_output_dtype,
        attributes=state.attributes,
    )
    return state


PIPELINE: tuple[Callable[[Converter, State, torch.device], State], ...] = (_classify, _place, _rewrite, _verify)


def _largest(tensors: Mapping[str, Any]) -> dict[str, float]:
    """Largest finite magnitude of each float32 constant and buffer that has values."""
    found: dict[str, float] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter) or tensor.is_meta:
            continue
        if tensor.dtype == torch.float32 and tensor.numel():
            finite = tensor.detach().abs()
            found[name] = float(finite.masked_fill(finite == float("inf"), 0).nan_to_num(0).max())
    return found


def _planned(node: fx.Node, state: State, low: torch.dtype, prefix: str) -> PlannedNode:
    placement, captured = state.placements[node], state.dtypes[node]
    guessed = "?" if node.name in (state.guesses or ()) else ""
    after = tuple(low if placement.store is Precision.LOW and d == torch.float32 else d for d in captured)
    return PlannedNode(
        name=prefix + node.name,
        op=op_name(node),
        module=module_path(node),
        decision=state.classification.decisions[node],
        placement=placement,
        captured=_names(captured) + guessed,
        dtype=_names(after) + guessed,
    )


def _casts(graph: fx.Graph, prefix: str) -> list[PlannedCast]:
    casts = ("to", of_function(cast_if))
    made = [(n, mark) for n in graph.nodes if (mark := origin(n)) is not None and op_name(n) in casts]
    return [
        PlannedCast(
            name=prefix + node.name,
            value=prefix + mark.value,
            dtype=_names(dtypes(node)),
            readers=tuple(prefix + reader.name for reader in node.users),
            saturates=mark.saturates,
        )
        for node, mark in made
    ]


def _names(found: tuple[torch.dtype, ...]) -> str:
    return ",".join(str(d).removeprefix("torch.") for d in found)
