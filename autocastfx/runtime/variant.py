"""One converted graph of a model: for one mode, one call structure and one set of sizes."""

from __future__ import annotations

import copy
import itertools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature, CallStructure, pack_spec, unpack_spec
from autocastfx.capture.python_state import Read, StateGuard
from autocastfx.capture.shape_guard import ShapeGuard
from autocastfx.capture.thread_state import keep_source
from autocastfx.errors import VariantError
from autocastfx.graph.serialize import GraphData, data_of, graph_of
from autocastfx.plan.plan import Plan
from autocastfx.runtime.fast_call import Reads, quick_graph
from autocastfx.runtime.working_copies import ATTRIBUTE

if TYPE_CHECKING:
    from autocastfx.capture.export import Captured

__all__ = ["Variant"]

_numbers = itertools.count()
# torch.export passes keyword arguments to a GraphModule by position, in the order in which they were given.
_EXPORT = str(Path(torch.__file__).parent / "export" / "_trace.py")


class _CallCode(CodeGen):
    """Lets what torch.fx makes of a flat graph (code, an interpreter) take the model's call and give its outputs."""

    def __init__(self, variant: Variant, signature: CallSignature) -> None:
        super().__init__()
        self.out_spec, self.structure, self.guard = variant.out_spec, variant.structure, variant.guard
        self.signature = signature

    def process_inputs(self, *args: Any) -> Any:
        if names := _keywords_of_export():
            count = len(args) - len(names)
            return self.tensors_of(*args[:count], **dict(zip(names, args[count:], strict=True)))
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        values = [one for one in args if not isinstance(one, torch.Tensor)]
        leaves = self.structure.leaves
        are_alike = [("tensor", t.dtype, t.ndim) for t in tensors] == [leaf for leaf in leaves if leaf[0] == "tensor"]
        if are_alike and values == [leaf[2] for leaf in leaves if leaf[0] == "value"]:
            return self._fitting(tensors)  # torch.export calls its interpreter with the leaves of the call
        return self.tensors_of(*args)

    def tensors_of(self, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        call = self.signature.bind(args, kwargs)
        if call.structure != self.structure:
            raise VariantError(f"the graph is that of the call ({self.structure}), not of ({call.structure})")
        return self._fitting(call.tensors)

    def _fitting(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        sizes = [t.shape for t in tensors]
        if not self.guard.holds(sizes):
            broken = self.guard.broken(sizes, self.structure.tensor_names())
            raise VariantError(f"the graph does not fit these sizes: {broken}")
        return tensors

    def process_outputs(self, outputs: Any) -> Any:
        return pytree.tree_unflatten(outputs, self.out_spec)

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = "".join(f"{name.partition(':')[0]}, " for name in free_vars)
        read = f"{names}= " if names else ""
        return f"def forward(self, *args, **kwargs):\n    {read}_tensors_of(*args, **kwargs)"

    def generate_output(self, output_args: Any, *, repr_fn: Callable[[Any], str] | None = None, **_: Any) -> str:
        return f"return _outputs_of({(repr_fn or repr)(output_args)})"

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [("_tensors_of", self.tensors_of), ("_outputs_of", self.process_outputs)]


def _keywords_of_export() -> list[str]:
    """Return the names of the last arguments, if torch.export runs the graph: it gives them in the caller's order."""
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 4):
        if frame.f_code.co_filename == _EXPORT and "kwargs" in frame.f_locals:
            return list(frame.f_locals["kwargs"])
    return []


def _not_mounted(*_: Any) -> tuple[Any, ...]:
    raise VariantError("this variant belongs to no AmpModule yet")


class Variant(nn.Module):
    """A converted graph with its constants and sub-graphs. Parameters and buffers belong to its owner.

    Attributes:
        graph: takes the call's tensors and returns a flat tuple.
        plan: the decisions and placements of the graph.
        structure, guard, modes: the call structure, sizes and module modes that it serves.
        state: attributes of the original that the graph depends on, with their values at capture.
        first_broken: returns an attribute that has changed since, or None; works after :meth:`watch`.
        device: where it runs and creates tensors.
        captured: the captured graph that it was made from; None after unpickling.
    """

    def __init__(
        self,
        *,
        graph: fx.Graph,
        attributes: Mapping[str, Any],
        plan: Plan,
        out_spec: pytree.TreeSpec,
        structure: CallStructure,
        guard: ShapeGuard,
        modes: tuple[bool, ...],
        device: torch.device,
        state: StateGuard,
        captured: Captured | None = None,
    ) -> None:
        super().__init__()
        self.graph, self.plan, self.out_spec = graph, plan, out_spec
        self.structure, self.guard, self.modes, self.device = structure, guard, modes, device
        self.state, self.captured = state, captured
        self.first_broken: Callable[[], Read | None] = state.unchanged
        self.autocast = device.type if torch.amp.is_autocast_available(device.type) else None
        self.prefix = ""
        self.code = ""
        self.function: Callable[..., tuple[Any, ...]] = _not_mounted
        self._held: dict[str, str] = {}
        for target in attributes:
            name = target.replace(".", "_")
            while hasattr(self, name) or name in self._held.values():  # a model may call a tensor ``plan``
                name += "_"
            self._held[target] = name
        for target, name in self._held.items():
            held: Any = attributes[target]
            if isinstance(held, torch.Tensor):
                self.register_buffer(name, held, persistent=False)
            else:
                setattr(self, name, held)

    @property
    def mode(self) -> str:
        """``"train"`` or ``"eval"``; ``"mixed"`` if modules are in different modes."""
        return "train" if all(self.modes) else "mixed" if any(self.modes) else "eval"

    def mount(self, prefix: str, signature: CallSignature) -> None:
        """Read constants and sub-graphs from ``prefix``, the path of this variant in its owner, and compile.

        Args:
            prefix: where the constants are.
            signature: of the owner's calls.
        """
        self.graph.set_codegen(_CallCode(self, signature))
        paths = {(f"{self.prefix}.{name}" if self.prefix else target): name for target, name in self._held.items()}
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target in paths:
                node.target = f"{prefix}.{paths[node.target]}"
        self.prefix = prefix
        self.compile_graph()

    def watch(self, model: nn.Module | None) -> None:
        """Check the attributes of ``model``, the original, from now on; with None, count them as unchanged."""
        self.first_broken = self.state.broken(model) if model is not None else self.state.unchanged

    def compile_graph(self) -> None:
        """Generate ``code`` and ``function(owner, *tensors)`` from the present graph."""
        self.code, traced = _compiled(self.graph)
        no_tensors = {f"{self.prefix}.{name}" for name in self._held.values() if name not in self._buffers}
        found = quick_graph(self.graph, {*no_tensors, ATTRIBUTE})
        self.function = traced if found is None else _quick(traced, _compiled(found[0])[1], found[1])

    def move(self, device: torch.device) -> None:
        """Move tensor creation in the graph from its present device to ``device``."""
        for graph in (self.graph, *(m.graph for m in self.modules() if isinstance(m, fx.GraphModule))):
            for node in graph.nodes:
                swap = _swap(self.device, device)
                node.args, node.kwargs = pytree.tree_map(swap, node.args), pytree.tree_map(swap, node.kwargs)
        for module in self.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()
        self.device = device
        self.autocast = device.type if torch.amp.is_autocast_available(device.type) else None
        self.compile_graph()

    def copied(self, memo: dict[int, Any] | None) -> Variant:
        """Return a copy, which shares what was captured; ``memo`` is a deep copy's, or None for a shallow one."""
        restore, parts = self.__reduce__()
        made: Variant = restore(*(copy.deepcopy(parts, memo) if memo is not None else parts))
        made.captured = self.captured
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        attributes: dict[str, Any] = {}
        for target, name in self._held.items():
            held = getattr(self, name)
            attributes[target] = GraphData.of(held) if isinstance(held, fx.GraphModule) else held
        places = {f"{self.prefix}.{name}": target for target, name in self._held.items()}
        fields = {
            "plan": self.plan,
            "out_spec": pack_spec(self.out_spec),
            "structure": self.structure,
            "guard": self.guard,
            "modes": self.modes,
            "state": self.state,
            "device": self.device,
        }
        return (_restore, (data_of(self.graph, places), attributes, fields))


def _compiled(graph: fx.Graph) -> tuple[str, Callable[..., tuple[Any, ...]]]:
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


def _quick(
    traced: Callable[..., tuple[Any, ...]], called: Callable[..., tuple[Any, ...]], reads: Reads
) -> Callable[..., tuple[Any, ...]]:
    """Return a function that runs ``called`` with the tensors read, or ``traced`` while compiling or if one is none."""

    def function(owner: nn.Module, *tensors: torch.Tensor) -> tuple[Any, ...]:
        held = None if torch.compiler.is_compiling() else reads(owner)
        return traced(owner, *tensors) if held is None else called(owner, *held, *tensors)

    function.__code__ = function.__code__.replace()  # torch.compile caches by code object: each has its own
    return function


def _swap(old: torch.device, new: torch.device) -> Callable[[Any], Any]:
    return lambda leaf: new if isinstance(leaf, torch.device) and leaf.type == old.type else leaf


def _restore(nodes: list[dict[str, Any]], attributes: dict[str, Any], fields: dict[str, Any]) -> Variant:
    held = {t: a.module() if isinstance(a, GraphData) else a for t, a in attributes.items()}
    rest: dict[str, Any] = {**fields, "out_spec": unpack_spec(fields["out_spec"])}
    return Variant(graph=graph_of(nodes), attributes=held, **rest)
