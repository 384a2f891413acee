"""``convert``: the whole way from a model to an :class:`AmpModule`, and the pipeline of each captured graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autocastfx.amp_module import AmpModule, Variant
from autocastfx.call import Call, CallSignature
from autocastfx.capture.export import Captured, capture
from autocastfx.errors import CaptureError, UnsupportedError
from autocastfx.graph import copy_graph, dtypes, module_path, origin, subgraphs
from autocastfx.kernel_facts import KernelFacts, load_kernel_facts
from autocastfx.op_list import OpList, OpListLike, load_op_list
from autocastfx.op_name import op_name
from autocastfx.passes.classify import Classification, Classifier
from autocastfx.passes.place import place
from autocastfx.passes.rewrite import Rewriter
from autocastfx.passes.verify import verify
from autocastfx.plan import Placement, Plan, PlannedCast, PlannedNode, Precision
from autocastfx.ports import Ports

__all__ = ["PIPELINE", "Converter", "convert"]

_LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
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
        graph, attributes, nodes, casts = self._convert(captured.graph, captured.attributes, tensors, device, "")
        plan = Plan(_LOW[self.low], device.type, self.op_list.name, tuple(nodes), tuple(casts))
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
        )
        computing = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        for run in PIPELINE:
            state = run(self, state, device)
        left = set(graph.nodes)
        nodes += [_planned(node, state, self.low, prefix, removed=node not in left) for node in computing]
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


def _planned(node: fx.Node, state: State, low: torch.dtype, prefix: str, *, removed: bool) -> PlannedNode:
    placement, captured = state.placements[node], state.dtypes[node]
    after = tuple(low if placement.store is Precision.LOW and d == torch.float32 else d for d in captured)
    return PlannedNode(
        name=prefix + node.name,
        op=op_name(node),
        module=module_path(node),
        decision=state.classification.decisions[node],
        placement=placement,
        captured=_names(captured),
        dtype=_names(after),
        removed=removed,
    )


def _casts(graph: fx.Graph, prefix: str) -> list[PlannedCast]:
    made = [(n, mark) for n in graph.nodes if (mark := origin(n)) is not None and op_name(n) == "to"]
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


def convert(
    model: nn.Module | fx.GraphModule | ExportedProgram,
    example_inputs: tuple[Any, ...] | torch.Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    op_list: OpListLike = "default",
    weights: str = "cast",
    fold: str = "exact",
    calibrate: Any = None,
    device: torch.device | str | None = None,
    keep_output_dtype: bool = True,
    plan: Any = None,
) -> AmpModule:
    """Turn a float32 model into a graph whose every cast to 16 bits, and back, is a node.

    Args:
        model: left as it is; the result shares its parameters and buffers, so training one trains the other.
        example_inputs: positional inputs of one call, as a tuple (one tensor may stand alone). Their sizes and dtypes
            matter, their values do not. Other sizes are served too, if need be by a further capture.
        example_kwargs: keyword inputs of that call.
        dtype: the 16-bit dtype: ``torch.float16`` or ``torch.bfloat16``.
        op_list: which op runs in which precision: a preset's name, a YAML path, an ``OpList``, or a sequence of these,
            of which the later win. ``"default"`` is the preset of ``dtype``.
        weights: ``"cast"``: parameters stay float32 and are cast in the graph. ``"cached"`` and ``"low"`` are reserved.
        fold: reserved; only the default is accepted, and no ``deny`` op is folded yet.
        calibrate: reserved.
        device: decide for the kernels of this device; the model's own by default.
        keep_output_dtype: cast float32 outputs back to float32.
        plan: reserved.

    Returns:
        A ``torch.fx.GraphModule`` that is called like ``model``.

    Raises:
        CaptureError: the model cannot be captured; it says why and what would help.
        OpListError: a list is wrong; with file, line and column.
        BannedOpError: the list bans an op of the model.
        UnsupportedError: a reserved argument was given.
        VerifyError: a defect of this package; nothing is handed out.
    """
    _check_arguments(dtype, weights, fold, calibrate, plan)
    converter = Converter(load_op_list(op_list, default=_LOW[dtype]), load_kernel_facts(), dtype, keep_output_dtype)
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: convert the original again, with the other arguments.")
    if isinstance(model, ExportedProgram):
        if example_inputs is None and example_kwargs is None and model.example_inputs is not None:
            example_inputs, example_kwargs = model.example_inputs
        module: nn.Module = model.module()
    elif isinstance(model, nn.Module):
        module = model
    else:
        raise TypeError(f"convert takes an nn.Module, a GraphModule or an ExportedProgram, not {type(model).__name__}")
    if example_inputs is None and example_kwargs is None:
        raise UnsupportedError(
            "convert(model) without inputs is not built yet: give one call's inputs, convert(model, (x,)) or "
            "convert(model, example_kwargs={...})."
        )
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs or ())
    baked = isinstance(module, fx.GraphModule) and hasattr(module, "_in_spec")  # torch.export made it
    signature = CallSignature.of(module.forward, by_position=len(args) if baked else 0)  # it insists on the form too
    try:
        call = signature.bind(args, example_kwargs or {})
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit {type(module).__name__}.forward: {error}.") from error
    leaves = tuple(name for name in converter.op_list.rules if "." in name and "::" not in name)
    target = torch.device(device) if device is not None else None
    maker = _Maker(converter, module, signature, leaves, target, baked)
    amp_model = AmpModule(module, signature, maker)
    flags = tuple(m.training for m in module.modules())
    modes = [flags] if baked else list(dict.fromkeys([flags, (True,) * len(flags), (False,) * len(flags)]))
    for mode in modes:
        try:
            amp_model.capture(call, mode)
        except CaptureError:
            if mode == flags:
                raise
    _warn_of_slow_kernels(amp_model, dtype)
    return amp_model


@dataclass(frozen=True)
class _Maker:
    """Makes variants: from a call, while the caller's model is at hand; or from what was captured, for a device."""

    converter: Converter
    model: nn.Module | None
    signature: CallSignature
    leaves: tuple[str, ...]
    device: torch.device | None
    baked: bool

    def capture(self, call: Call, modes: tuple[bool, ...], held: Mapping[str, torch.Tensor], sizes: str) -> Variant:
        if self.model is None:
            raise CaptureError("the original model is not at hand")
        found = capture(self.model, self.signature, call, training=modes, held=held, leaves=self.leaves, sizes=sizes)
        return self.rebuild(found, held, self.device or found.device)

    def rebuild(self, captured: Captured, held: Mapping[str, torch.Tensor], device: torch.device) -> Variant:
        return self.converter(captured, held, device)

    def without_model(self) -> _Maker:
        return replace(self, model=None)


def _check_arguments(dtype: torch.dtype, weights: str, fold: str, calibrate: Any, plan: Any) -> None:
    if dtype not in _LOW:
        raise ValueError(f"dtype is torch.float16 or torch.bfloat16, not {dtype!r}")
    reserved = {
        "weights": (weights, "cast"),
        "fold": (fold, "exact"),
        "calibrate": (calibrate, None),
        "plan": (plan, None),
    }
    for name, (given, default) in reserved.items():
        if given is not default and given != default:
            raise UnsupportedError(f"{name}={given!r} is reserved and not built yet; leave it at {default!r}.")


def _warn_of_slow_kernels(amp_model: AmpModule, dtype: torch.dtype) -> None:
    if dtype != torch.float16 or amp_model.plan.device != "cpu":
        return
    if any(n.op.startswith("conv") and n.placement.run is Precision.LOW for n in amp_model.plan.nodes):
        warnings.warn(
            "float16 convolutions on a CPU are hundreds of times slower than float32 ones; use dtype=torch.bfloat16 "
            "there.",
            stacklevel=3,
        )
