"""The graphs that Dynamo has captured of one model, each with what every conversion has made of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autocastfx.capture.call import CallSignature, CallStructure, device_among
from autocastfx.capture.dynamo import compiled_in_one_graph, contexts_for, forward_caller
from autocastfx.capture.export import Captured
from autocastfx.capture.leave_intact import capturing, garbage_left, own_thread_state
from autocastfx.capture.progress import stage
from autocastfx.capture.shape_guard import shape_guard
from autocastfx.graph.node import Held, set_value, value
from autocastfx.plan.ranges import mode_of

if TYPE_CHECKING:
    from autocastfx.capture.dynamo_graph import DynamoGraph
    from autocastfx.runtime.around import Around


class Runs(Protocol):
    """A conversion, which makes something of each captured graph and runs it."""

    def run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Run a graph as converted, with Dynamo's inputs."""
        ...


@dataclass
class Now(threading.local):
    """The call of a converted model that is running in a thread."""

    runs: Runs | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    around: Around | None = None  # what is left meanwhile, and entered again where the converted graph runs
    last: tuple[CapturedGraph, Sequence[Any], Any] | None = None  # the graph that ran, its inputs and its outputs


NOW = Now()


@dataclass
class Results:
    """Where the leaves of the model's output are: a graph of Dynamo's gives what Dynamo needs, in an order of its own.

    Attributes:
        spec: the nesting of the output; None until a call has shown it.
        places: of each leaf: the number of an output, or of a tensor of the call; or a value that is neither.
    """

    spec: pytree.TreeSpec | None = None
    places: tuple[tuple[str, Any], ...] = ()

    def note(self, result: Any, outputs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Find the leaves of what a call with ``tensors`` has returned among the outputs of the graph."""
        leaves, self.spec = pytree.tree_flatten(result)
        known = {id(one): ("tensor", i) for i, one in enumerate(tensors)}
        known |= {id(one): ("output", i) for i, one in enumerate(outputs) if isinstance(one, torch.Tensor)}
        self.places = tuple(known.get(id(one)) or ("value", one) for one in leaves)

    def output(self, outputs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Return the model's output, from the outputs of the graph and the tensors of the call."""
        given = {"output": outputs, "tensor": tensors}
        leaves = [given[kind][where] if kind in given else where for kind, where in self.places]
        return pytree.tree_unflatten(leaves, cast("pytree.TreeSpec", self.spec))


@dataclass(eq=False)
class CapturedGraph:
    """A graph that Dynamo has captured.

    Attributes:
        captured: the graph; its inputs are the tensors of the call, and what else Dynamo passes.
        places: the names of Dynamo's inputs, in Dynamo's order.
        held: the parameters and buffers that it reads, and tensors from elsewhere, as they were when captured.
        others: how many inputs are no tensors of the call: numbers that change from call to call.
        results: where the model's output is.
        inside: graphs that run again in backward, by the node that calls them.
        varying: the names of tensors in ``held`` whose numbers have changed, so that nothing rests on them.
    """

    captured: Captured
    places: tuple[str, ...]
    held: Mapping[str, torch.Tensor]
    others: int = 0
    results: Results = field(default_factory=Results)
    inside: Mapping[str, CapturedGraph] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)


class Captures:
    """Captures a model at its calls, each time that no graph fits, and runs what fits.

    The model itself stays as it is: Dynamo captures its call through a method of ours.

    Attributes:
        model: the caller's.
        signature: of its forward.
        graphs: in the order of capture.
    """

    def __init__(
        self, model: nn.Module, signature: CallSignature, whole: Iterable[Any] = (), root: nn.Module | None = None
    ) -> None:
        self.model, self.signature, self._whole, self._root = model, signature, frozenset(whole), root or model
        self.graphs: list[CapturedGraph] = []
        self._hooks, self._seen = _hooks_of(model), RemovableHandle.next_id
        self._begin()

    def _begin(self) -> None:
        self._call = compiled_in_one_graph(forward_caller(self.model), self._backend, contexts_for(self.model))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model by the graph that fits."""
        if self._seen != RemovableHandle.next_id:  # torch numbers all hooks of a process
            self._look_at_hooks()
        return self._call(*args, **kwargs)

    def _look_at_hooks(self) -> None:
        """Capture anew if a module of the model has got a hook: Dynamo's guards do not look for the first of one."""
        self._seen, hooks = RemovableHandle.next_id, _hooks_of(self.model)
        if hooks != self._hooks:
            self._hooks = hooks
            self._begin()

    def _backend(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Take a graph of Dynamo's; return what Dynamo calls in its place."""
        with capturing(), own_thread_state(), garbage_left():
            modes = tuple(m.training for m in self.model.modules())
            with stage(f"capturing {type(self.model).__name__} in {mode_of(modes)} mode", "capture"):
                graph = self._captured(module, inputs, modes)
        self.graphs.append(graph)
        return partial(_run, graph)

    def _captured(self, module: fx.GraphModule, inputs: list[Any], modes: tuple[bool, ...]) -> CapturedGraph:
        from autocastfx.capture.dynamo_graph import aten_graph

        call, paths = self.signature.describe(NOW.args, NOW.kwargs), self._paths()
        taken = set(paths.values())
        names = [f"{name}_" if name in taken else name for name in call.structure.tensor_names()]
        named = {id(tensor): name for tensor, name in zip(call.tensors, names, strict=True)}
        dynamo = aten_graph(module, inputs, self._whole, paths, [], named)
        device = device_among((*dynamo.tensors.values(), *inputs))
        values = dict(zip(dynamo.places, inputs, strict=True))
        return _graph_of(dynamo, call.structure, names, values, modes, device, self._whole, paths)

    def _paths(self) -> dict[int, str]:
        model = self._root
        members = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
        return {id(member): name for name, member in members}


def _run(graph: CapturedGraph, *inputs: Any) -> Any:
    runs = NOW.runs
    if runs is None:
        raise RuntimeError("a captured graph runs inside of a call of a converted model alone")
    return runs.run_graph(graph, inputs)


def _graph_of(
    dynamo: DynamoGraph,
    structure: CallStructure,
    names: Sequence[str],
    values: Mapping[str, Any],
    modes: tuple[bool, ...],
    device: torch.device,
    whole: frozenset[Any],
    paths: Mapping[int, str],
) -> CapturedGraph:
    """Return a graph whose first inputs are the tensors of a call, by ``names``."""
    from autocastfx.capture.dynamo_graph import WholeCall, aten_graph

    graph, attributes = dynamo.graph, dynamo.attributes
    held = {**dynamo.tensors, **_read_globals(graph, values, names)}
    others = _order_inputs(graph, names)
    inputs = graph.find_nodes(op="placeholder")
    guard = shape_guard([node for node in inputs if isinstance(value(node), torch.Tensor)])
    captured = Captured(graph, attributes, pytree.tree_structure(()), structure, guard, modes, device)
    inside: dict[str, CapturedGraph] = {}
    for node in graph.nodes:
        if isinstance(node.target, WholeCall) and (again := node.target.recomputed) is not None:
            passed = [Held.of(one) if isinstance(one, fx.Node) else None for one in node.target.passed(node.args)]
            part = aten_graph(again, None, whole, paths, passed)
            inside[node.name] = _graph_of(part, structure, (), {}, modes, device, whole, paths)
    return CapturedGraph(captured, tuple(dynamo.places), held, others, inside=inside)


def _read_globals(graph: fx.Graph, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read tensors that lie outside of the model and of the call by ``get_attr``; return them."""
    outside: dict[str, torch.Tensor] = {}
    for node in graph.find_nodes(op="placeholder"):
        given = values.get(str(node.target))
        if isinstance(given, torch.Tensor) and not isinstance(given, FakeTensor) and node.target not in names:
            node.op = "get_attr"
            outside[str(node.target)] = given
    return outside


def _order_inputs(graph: fx.Graph, names: Sequence[str]) -> int:
    """Let the tensors of the call be the first inputs, and sizes of them be read from them.

    Returns:
        How many other inputs there are.
    """
    inputs = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    first = next(iter(graph.nodes))
    for name in names:
        if name in inputs:
            first.prepend(node := inputs.pop(name))
        else:  # which forward does not read
            with graph.inserting_before(first):
                node = graph.create_node("placeholder", name, name=name)
        first = node.next
    sizes: dict[Any, tuple[fx.Node, int]] = {}
    for node in graph.find_nodes(op="placeholder"):
        abstract = value(node)
        for dim, size in enumerate(abstract.shape if isinstance(abstract, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, (node, dim))
    others, last = 0, first.prev
    for node in inputs.values():
        abstract = value(node)
        is_size = isinstance(abstract, torch.SymInt) and bool(node.users)
        if is_size and (place := sizes.get(abstract.node.expr)) is not None:
            with graph.inserting_after(last):
                size = graph.call_function(torch.ops.aten.sym_size.int, place)
            set_value(size, abstract)
            node.replace_all_uses_with(size)
            graph.erase_node(node)
        elif node.users or isinstance(abstract, torch.Tensor):
            others += 1
        else:
            graph.erase_node(node)
    return others


def _hooks_of(model: nn.Module) -> frozenset[tuple[int, str, int]]:
    """Return the hooks of a model's modules, by their numbers; its own run outside of the graph."""
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return frozenset(
        (id(module), table, number)
        for module in model.modules()
        if module is not model
        for table in tables
        for number in getattr(module, table)
    )
