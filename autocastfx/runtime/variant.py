"""One converted graph of a model, and the tensors on whose numbers its decisions rest."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

from autocastfx.capture.captured import Captured
from autocastfx.capture.leave_intact import keep_source
from autocastfx.capture.shape_guard import shape_guard
from autocastfx.errors import UnmatchedRuleWarning, VariantError
from autocastfx.graph.node import recomputed, value
from autocastfx.graph.walk import mode_of
from autocastfx.plan.plan import Plan
from autocastfx.runtime.captures import NOW, CapturedGraph
from autocastfx.runtime.quick_graph import lift, quickened
from autocastfx.runtime.regions import fuse_regions, regions_in
from autocastfx.runtime.saved import Forms, keep_chosen, planned_form
from autocastfx.runtime.working_copies import ATTRIBUTE, WorkingCopies
from autocastfx.training.unscaled_step import watch_first_step


class Variant(nn.Module):
    """A converted graph with its constants and sub-graphs. Parameters and buffers belong to its owner.

    Its function takes the owner, the working copies, and Dynamo's inputs.

    Attributes:
        graph: takes the call's tensors, and numbers that change from call to call; returns a flat tuple.
        plan: the decisions and placements of the graph.
        structure, guard, modes: the call structure, sizes and module modes that it serves.
        device: where it runs and creates tensors.
        captured: the captured graph that it was made from; None where the model has other weights now.
        keeping: the graph whose ops save for backward what the plan says, for runs node by node.
        places: the names of Dynamo's inputs, in Dynamo's order.
        results: where the model's output is.
        fixed: the tensors on whose numbers decisions rest.
        regions: how many regions Inductor compiles, and of how many kinds.
    """

    def __init__(self, graph: CapturedGraph, made: Any) -> None:
        super().__init__()
        captured = graph.captured
        self.graph: fx.Graph = made.graph
        self.keeping, self.plan = self.graph, cast("Plan", made.plan)
        self.structure, self.modes, self.device = captured.structure, captured.training, captured.device
        self.captured: Captured | None = captured
        self.guard = shape_guard(captured.graph.find_nodes(op="placeholder"))  # a pass may settle sizes
        conditions = () if graph.settled is None else (c for c in self.guard.conditions if c not in graph.settled)
        self._settled = replace(self.guard, conditions=tuple(conditions))  # by another conversion than the first one
        self.places, self.results = graph.places, graph.results
        self.fixed: Sequence[FixedTensor] = ()
        self.fuse, self.regions = "none", (0, 0)
        self.autocast = self.device.type if torch.amp.is_autocast_available(self.device.type) else None
        self.prefix = self.code = ""
        self._held: dict[str, str] = {}
        for target, constant in made.attributes.items():
            name = target.replace(".", "_")
            while hasattr(self, name):  # a model may call a tensor ``plan``
                name += "_"
            self._held[target] = name
            if isinstance(constant, torch.Tensor):
                self.register_buffer(name, constant, persistent=False)
            else:
                setattr(self, name, constant)

    @property
    def mode(self) -> str:
        """``"train"`` or ``"eval"``; ``"mixed"`` if modules are in different modes."""
        return "train" if all(self.modes) else "mixed" if any(self.modes) else "eval"

    def mount(self, prefix: str) -> None:
        """Read constants and sub-graphs from ``prefix``, the path of this variant in its owner, and compile."""
        paths = {(f"{self.prefix}.{name}" if self.prefix else target): name for target, name in self._held.items()}
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target in paths:
                node.target = f"{prefix}.{paths[node.target]}"
        self.prefix = prefix
        self.compile_graph()
        self.graph.set_codegen(CodeGen())

    def output(self, outputs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Return the model's output, from the outputs of the graph and the tensors of the call."""
        return self.results.output(outputs, tensors)

    def refuse_other_sizes(self, inputs: Sequence[Any]) -> None:
        """Refuse sizes beyond those for which this conversion decides, but Dynamo's guards do not.

        Raises:
            VariantError: they are.
        """
        if self._settled.conditions:
            given = dict(zip(self.places, inputs, strict=True))
            tensors = (given.get(str(node.target)) for node in self.graph.find_nodes(op="placeholder"))
            sizes = [one.shape if isinstance(one, torch.Tensor) else () for one in tensors]
            if not self._settled.holds(sizes):
                raise VariantError(f"this conversion decides for sizes where {self._settled}: convert the model again.")

    def has_changed(self, inputs: Sequence[Any]) -> bool:
        """True if a tensor on whose numbers decisions rest may have other numbers now."""
        try:  # in each call, for each buffer: without a call of Python
            return any(f.tensor() is not (now := inputs[f.place]) or f.version != now._version for f in self.fixed)
        except RuntimeError:  # a tensor of inference mode has no version
            return not all(fixed.is_as_before(inputs) for fixed in self.fixed)

    def still_holds(self, graph: CapturedGraph, converter: Any, inputs: Sequence[Any]) -> bool:
        """Look at those tensors: true if decisions rest on nothing that has changed, else the graph is to be converted.

        What has changed is noted in ``graph``, and no decision rests on it from then on.
        """
        changed, now = set[str](), list[FixedTensor]()
        for fixed in self.fixed:
            tensor = inputs[fixed.place]
            is_read = NOW.around is None or not NOW.around.stands_for(tensor)
            facts = fixed.facts if fixed.is_as_before(inputs) else converter.fixed_facts(tensor) if is_read else ()
            if facts == fixed.facts:
                now.append(FixedTensor.of(fixed.place, tensor, facts))
            else:
                changed.add(graph.places[fixed.place])
        self.fixed = now
        graph.varying |= changed
        return not changed

    def compile_graph(self, forms: Forms = planned_form) -> None:
        """Generate ``code`` and ``function(owner, copies, *inputs)`` from the present graph."""
        self.code, _ = compiled(self.graph)
        self.keeping = self.graph
        constants = [f"{self.prefix}.{name}" for name in self._held.values() if name in self._buffers]
        lifted = lift(self.graph, [ATTRIBUTE, *self.places, *constants])
        if self.fuse == "inductor":
            lifted = fuse_regions(lifted, self.device.type)
            self.regions = regions_in(lifted)
        called = quickened(lifted)
        if saved := self.plan.saved:
            self.keeping = keep_chosen(self.graph, saved, forms)
            called = keep_chosen(called, saved, forms)
        _, function = compiled(called)
        held = [getattr(self, name) for name in self._held.values() if name in self._buffers]

        def run(owner: nn.Module, copies: WorkingCopies | None, *inputs: Any) -> tuple[Any, ...]:
            return function(owner, copies, *inputs, *held)

        self.function = run if held else function
        if any(self.modes) and self.plan.low == "float16" and any(one.dtype == "float16" for one in self.plan.casts):
            self.function = self._until_trained(self.function)
        self._traced: Callable[..., tuple[Any, ...]] | None = None
        self.has_copies = any(node.target == ATTRIBUTE for node in self.graph.find_nodes(op="get_attr"))

    def _until_trained(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` as it runs up to the first call with gradients, after which an optimizer may step."""

        def run(owner: nn.Module, copies: WorkingCopies | None, *inputs: Any) -> tuple[Any, ...]:
            outputs = function(owner, copies, *inputs)
            if any(isinstance(one, torch.Tensor) and one.requires_grad for one in outputs):
                self.function = function
                watch_first_step(owner)
            return outputs

        return run

    def traced(self, owner: nn.Module) -> Callable[..., tuple[Any, ...]]:
        """Return a function of Dynamo's inputs for a compiler to look into."""
        if self._traced is None:
            if self.has_copies:
                warnings.warn(
                    'weights="cached" has no effect under torch.compile: the graph casts its parameters in each call.',
                    stacklevel=2,
                )
            if self.plan.saved:
                warnings.warn(
                    "torch.compile chooses itself what is kept for backward and what is recomputed: the rules under "
                    "'saved' have no effect there. torch._functorch.config.activation_memory_budget sets how much it "
                    "keeps.",
                    UnmatchedRuleWarning,
                    stacklevel=2,
                )
            constants = [f"{self.prefix}.{name}" for name in self._held.values() if name in self._buffers]
            _, function = compiled(lift(self.graph, [ATTRIBUTE, *constants, *self.places]))
            held = [getattr(self, name) for name in self._held.values() if name in self._buffers]
            self._traced = partial(function, owner, None, *held)  # with no code that compilers see for all models
        return self._traced


def converted_variant(
    converter: Any, graph: CapturedGraph, held: Mapping[str, torch.Tensor], device: torch.device | None
) -> Variant:
    """Convert a captured graph, and those in it that run again in backward.

    Args:
        converter: converts it.
        graph: stays as it is.
        held: what it reads that is no argument and whose numbers stay, by the names in it.
        device: decide for this one; None: for that of the graph.
    """
    device = device or graph.captured.device
    variant = Variant(graph, _converted(converter, graph, held, device))
    variant.fuse = converter.fuse
    places = {name: i for i, name in enumerate(graph.places)}
    fixed = ((n, t) for n, t in held.items() if n in places and not t.requires_grad)
    with_facts = ((n, t, converter.fixed_facts(t)) for n, t in fixed)
    variant.fixed = [FixedTensor.of(places[n], t, facts) for n, t, facts in with_facts if facts]
    return variant


def decided_plan(
    converter: Any, graph: CapturedGraph, held: Mapping[str, torch.Tensor], device: torch.device | None
) -> Plan:
    """Return the plan of such a conversion, apart from casts and copies, in half of the time: nothing is rewritten."""
    return _converted(converter, graph, held, device or graph.captured.device, rewrites=False).plan


def _converted(
    converter: Any,
    graph: CapturedGraph,
    held: Mapping[str, torch.Tensor],
    device: torch.device,
    prefix: str = "",
    *,
    rewrites: bool = True,
) -> Any:
    captured = graph.captured
    abstract = {str(node.target): value(node) for node in captured.graph.find_nodes(op="get_attr")}
    tensors = {name: held.get(name, abstract[name]) for name in graph.held if name in held or name in abstract}
    made = converter.convert_graph(
        *(captured.graph, captured.attributes, tensors, device),
        mode=mode_of(captured.training),
        rewrites=rewrites,
        prefix=prefix,
    )
    again = replace(converter, weights="cast", keep_output_dtype=True)
    for node in made.graph.nodes:
        if recomputed(node):
            inner = graph.inside[node.name]
            part = _converted(again, inner, inner.read({}), device, f"{prefix}{node.name}/", rewrites=rewrites)
            lifted = lift(part.graph, inner.places)
            node.target = node.target.with_recomputed(fx.GraphModule(dict(part.attributes), lifted))
            made = replace(made, plan=made.plan.with_inside(part.plan))
    return made


@dataclass(frozen=True)
class FixedTensor:
    """A tensor that no optimizer changes, and on whose numbers decisions rest.

    Attributes:
        place: the number of Dynamo's input.
        tensor: it, if it is still there.
        version: how often it had been written into.
        facts: what decisions rest on.
    """

    place: int
    tensor: weakref.ref[torch.Tensor]
    version: int
    facts: tuple[object, ...]

    @classmethod
    def of(cls, place: int, tensor: torch.Tensor, facts: tuple[object, ...]) -> FixedTensor:
        """Note the tensor as it is now."""
        return cls(place, weakref.ref(tensor), _version(tensor), facts)

    def is_as_before(self, inputs: Sequence[Any]) -> bool:
        """True if it is the same tensor, and nothing was written into it."""
        now = inputs[self.place]
        return self.tensor() is now and _version(now) == self.version


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def compiled(graph: fx.Graph) -> tuple[str, Callable[..., tuple[Any, ...]]]:
    """Generate the code of ``graph`` and its flat function; tracebacks show the source."""
    for_others = graph._codegen
    graph.set_codegen(CodeGen())
    try:
        code = graph.python_code("self")
    finally:
        graph.set_codegen(for_others)
    filename = f"<autocastfx graph {next(_numbers)}>"
    namespace = dict(code.globals)
    exec(compile(code.src, filename, "exec"), namespace)
    keep_source(namespace["forward"], code.src)
    return code.src, namespace["forward"]


_numbers = itertools.count()
