"""A graph of Dynamo's as one conversion makes it, and the tensors on whose numbers its decisions rest."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

from autocastfx.capture.call import CallSignature
from autocastfx.capture.shape_guard import shape_guard
from autocastfx.errors import UnmatchedRuleWarning, VariantError
from autocastfx.graph.node import recomputed, value
from autocastfx.plan.plan import Plan
from autocastfx.plan.ranges import mode_of
from autocastfx.runtime.captures import NOW, CapturedGraph
from autocastfx.runtime.saved import Forms, keep_chosen, planned_form
from autocastfx.runtime.variant import Variant, compiled, lift, quickened
from autocastfx.runtime.working_copies import ATTRIBUTE, WorkingCopies


def converted_variant(
    converter: Any, graph: CapturedGraph, held: Mapping[str, torch.Tensor], device: torch.device | None
) -> DynamoVariant:
    """Convert a captured graph, and those in it that run again in backward.

    Args:
        converter: converts it.
        graph: stays as it is.
        held: what it reads that is no argument and whose numbers stay, by the names in it.
        device: decide for this one; None: for that of the graph.
    """
    device = device or graph.captured.device
    variant = DynamoVariant(graph, _converted(converter, graph, held, device))
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


class DynamoVariant(Variant):
    """A converted graph of Dynamo's: its function takes the owner, the working copies, and Dynamo's inputs."""

    def __init__(self, graph: CapturedGraph, made: Any) -> None:
        captured = graph.captured
        super().__init__(
            graph=made.graph,
            attributes=made.attributes,
            plan=made.plan,
            out_spec=captured.out_spec,
            structure=captured.structure,
            guard=shape_guard(captured.graph.find_nodes(op="placeholder")),  # a pass may settle sizes
            modes=captured.training,
            device=captured.device,
            captured=captured,
        )
        self.places, self.results = graph.places, graph.results
        conditions = () if graph.settled is None else (c for c in self.guard.conditions if c not in graph.settled)
        self._settled = replace(self.guard, conditions=tuple(conditions))  # by another conversion than the first one
        self.fixed: Sequence[FixedTensor] = ()

    def mount(self, prefix: str, signature: CallSignature) -> None:
        """Read constants from ``prefix``, the path of this variant in its owner, and compile."""
        super().mount(prefix, signature)
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
        return bool(self.fixed) and not all(fixed.is_as_before(inputs) for fixed in self.fixed)

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
        called = quickened(lift(self.graph, [ATTRIBUTE, *self.places, *constants]))
        if saved := self.plan.saved:
            self.keeping = keep_chosen(self.graph, saved, forms)
            called = keep_chosen(called, saved, forms)
        _, function = compiled(called)
        held = [getattr(self, name) for name in self._held.values() if name in self._buffers]

        def run(owner: nn.Module, copies: WorkingCopies | None, *inputs: Any) -> tuple[Any, ...]:
            return function(owner, copies, *inputs, *held)

        self.function = run if held else function
        self._traced: Callable[..., tuple[Any, ...]] | None = None
        self.has_copies = any(node.target == ATTRIBUTE for node in self.graph.find_nodes(op="get_attr"))

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
