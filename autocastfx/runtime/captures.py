"""The graphs that Dynamo has captured of one model, each with what every conversion has made of it."""

from __future__ import annotations

import copy
import logging
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autocastfx.capture.call import Call, CallSignature, CallStructure, device_among
from autocastfx.capture.captured import Captured
from autocastfx.capture.dynamo import (
    compiled_in_one_graph,
    contexts_for,
    for_any_size,
    forward_caller,
    may_be_of_model,
    plain_error,
)
from autocastfx.capture.guards import asks_for_gradients
from autocastfx.capture.kept_whole import keeping_whole
from autocastfx.capture.leave_intact import capturing, isolated, own_thread_state, set_up_by_call
from autocastfx.capture.mended import (
    pads,
    refuse_leaves,
    stored_results,
    tell_of_caches,
    tell_of_padding,
)
from autocastfx.capture.plain_function import FunctionModule
from autocastfx.capture.progress import capture_shown, stage
from autocastfx.capture.shape_guard import shape_guard
from autocastfx.errors import CaptureError, ManyVariantsWarning
from autocastfx.graph.alias import note_inner_writes
from autocastfx.graph.node import HELD, STORED, HeldTensor, path_and_around, set_value, value
from autocastfx.graph.walk import all_nodes, mode_of
from autocastfx.runtime.quick_graph import lift

if TYPE_CHECKING:
    from autocastfx.capture.dynamo_graph import DynamoGraph
    from autocastfx.runtime.around import Around


class Captures:
    """Captures a model at its calls, each time that no graph fits, and runs what fits.

    The model itself stays as it is: Dynamo captures its call through a method of ours.

    Attributes:
        model: the caller's.
        signature: of its forward.
        graphs: in the order of capture.
    """

    def __init__(
        self,
        model: nn.Module,
        signature: CallSignature,
        whole: Iterable[Any] = (),
        root: nn.Module | None = None,
        *,
        any_size: bool = False,
    ) -> None:
        self.model, self.signature, self._whole, self._root = model, signature, frozenset(whole), root or model
        self.graphs: list[CapturedGraph] = []
        self._any_size = any_size
        self._was_set_up = False  # a first call may set the model up, under a lock
        self._pads = False  # that it computes padded places is told once
        self._cached: dict[str, None] = {}  # functions that were told of
        self._asks = False  # the code asks whether gradients are recorded: there are graphs with and without
        self._hooks, self._seen = _hooks_of(model), RemovableHandle.next_id
        self._begin()

    @property
    def is_of_part(self) -> bool:
        """True for a module inside of the model that was converted."""
        return self._root is not self.model

    def _begin(self) -> None:
        around = [*contexts_for(self.model), lambda: keeping_whole(self._whole, autograd=True)]
        around += [for_any_size] if self._any_size else []
        self._why_again = ""
        around += [lambda: capture_shown(type(self.model).__name__, lambda: self._why_again)]
        self._call = compiled_in_one_graph(forward_caller(self.model), _weakly(self._backend), around)

    def call(self, runs: Runs, args: Sequence[Any], kwargs: Mapping[str, Any], *, around: Around | None = None) -> Any:
        """Call the model; ``runs`` runs the graph that fits, in what is ``around`` the call."""
        if self._seen != RemovableHandle.next_id:  # torch numbers all hooks of a process
            self._look_at_hooks()
        now = NOW
        before = now.runs, now.args, now.kwargs, now.around, now.without
        now.runs, now.args, now.kwargs, now.around, now.without = runs, args, kwargs, around, None
        try:
            try:
                if torch.is_grad_enabled() or self._asks:
                    return self._call(*args, **kwargs)
                return self._call_without_gradients(args, kwargs)
            except RuntimeError as error:
                if (plain := plain_error(error, self.model, args, kwargs)) is None:
                    raise
            if not self.graphs and not self._was_set_up and _LOCK.search(str(plain)) is not None:
                self._was_set_up = True
                if (undo := set_up_by_call(self.model, args, kwargs)) is not None:
                    return self._call_set_up(undo, plain, args, kwargs)
            return self._call_apart(plain, args, kwargs)
        finally:
            now.runs, now.args, now.kwargs, now.around, now.without = before

    def call_as_model(
        self, runs: Runs, args: Sequence[Any], kwargs: Mapping[str, Any], *, around: Around | None = None
    ) -> Any:
        """Call the model; where nothing can be captured, raise what the model raises, as one that checks its inputs."""
        try:
            return self.call(runs, args, kwargs, around=around)
        except CaptureError as error:
            failure = error
        if may_be_of_model(failure) and self._raises(args, kwargs):
            self.model(*args, **kwargs)  # outside of the handler, whose error would be the other's context
        raise failure

    def _raises(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Try whether the model itself raises in a call, on copies of all that it may change."""
        try:
            copied, named = copied_arguments((tuple(args), dict(kwargs)))
        except TypeError:
            return False
        try:
            with isolated(self.model):
                self.model(*copied, **named)
        except Exception:  # whatever the model raises
            return True
        return False

    def _call_set_up(
        self, undo: Callable[[], None], plain: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Capture the model after what its first call adds to it: that code is behind it, and breaks no graph.

        Only code under a lock is taken to set up what is shared, and to do so once: other code may change in its first
        call what nobody can give back.
        """
        runs, around = cast("Runs", NOW.runs), NOW.around
        try:
            return self.call(runs, args, kwargs, around=around)
        except RuntimeError:
            undo()
            raise plain from None

    def _call_without_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph for calls with gradients, without: Dynamo would capture another one."""
        is_inference = torch.is_inference_mode_enabled()
        NOW.without = torch.inference_mode if is_inference else torch.no_grad
        try:
            with torch.inference_mode(False) if is_inference else nullcontext(), torch.enable_grad():
                return self._call(*args, **kwargs)
        except _AsksError:
            NOW.without = None
            return self._call(*args, **kwargs)

    def _call_apart(self, plain: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run or capture a graph for these sizes alone, and for calls without gradients: one for more failed."""
        with_gradients, asked = torch.is_grad_enabled(), self._asks
        if with_gradients and not self.graphs:
            raise plain
        NOW.without, self._asks = None, asked or not with_gradients
        try:
            with cast("Any", torch._dynamo.config).patch(automatic_dynamic_shapes=False):
                return self._call(*args, **kwargs)
        except RuntimeError as error:
            self._asks = asked
            raise plain_error(error, self.model, args, kwargs) or error from None

    def _look_at_hooks(self) -> None:
        """Capture anew if a module of the model has got a hook: Dynamo's guards do not look for the first of one."""
        self._seen, hooks = RemovableHandle.next_id, _hooks_of(self.model)
        if hooks != self._hooks:
            self._hooks = hooks
            self._begin()

    def _backend(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Take a graph of Dynamo's; return what Dynamo calls in its place."""
        stored = stored_results()
        refuse_leaves(module)
        self._asks |= asks_for_gradients()
        with capturing(), own_thread_state():
            modes = tuple(m.training for m in self.model.modules())
            with stage(f"capturing {type(self.model).__name__} in {mode_of(modes)} mode", "capture"):
                graph = self._captured(module, inputs, modes)
        if isinstance(self.model, FunctionModule):
            self.model.refuse_trained(graph.read({}), graph.captured.graph)
        self._name_outer_modules(graph)
        graph.captured.graph.output_node().meta[STORED] = stored
        if NOW.runs is not None:
            NOW.runs._prepare(graph)
        graph.settle()
        self.graphs.append(graph)
        self._why_again = _tell_of_recapture([one.captured for one in self.graphs])
        if pads() and not self._pads:
            self._pads = True
            tell_of_padding()
        tell_of_caches(self._cached)
        return partial(_run, weakref.ref(self), weakref.ref(graph))

    def _name_outer_modules(self, graph: CapturedGraph) -> None:
        """Let nodes know the captured module, and those around it: Dynamo names the modules inside of it alone."""
        path = next((name for name, module in self._root.named_modules() if module is self.model), "")
        outer = [(name, self._root.get_submodule(name)) for name in path_and_around(path)]
        stack = {str(id(module)): (name, type(module)) for name, module in outer}
        for part in (graph, *graph.inside.values()):
            for node in all_nodes(part.captured.graph, part.captured.attributes):
                inner: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
                if node.op == "call_function":
                    node.meta["nn_module_stack"] = stack | {key: entry for key, entry in inner.items() if key}

    def _captured(self, module: fx.GraphModule, inputs: list[Any], modes: tuple[bool, ...]) -> CapturedGraph:
        call, paths = self.signature.describe(NOW.args, NOW.kwargs), paths_of([self._root])
        return captured_graph(module, inputs, self._whole, paths, modes, call)


def copied_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the tensors and the objects; one that is given twice stays one.

    Raises:
        TypeError: an object cannot be copied.
    """
    made: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            try:
                return copy.deepcopy(leaf, made)
            except Exception as error:  # whatever the object raises
                raise TypeError(f"an argument cannot be copied: {error}") from error
        if id(leaf) not in made:
            made[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    return pytree.tree_map(copied, arguments)


class Runs(Protocol):
    """A conversion, which makes something of each captured graph and runs it."""

    def _run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Run a graph as converted, with Dynamo's inputs."""
        ...

    def _prepare(self, graph: CapturedGraph) -> None:
        """Convert a graph while Dynamo captures: what that settles of symbolic sizes is part of Dynamo's guards."""
        ...


@dataclass
class Now(threading.local):
    """The call of a converted model that is running in a thread."""

    runs: Runs | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    without: Callable[[], AbstractContextManager[object]] | None = None  # gradients are switched off by this
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
        held: the names of parameters and buffers that it reads, and of tensors from elsewhere, with what was last read.
        others: how many inputs are no tensors of the call: numbers that change from call to call.
        results: where the model's output is.
        inside: graphs that run again in backward, by the node that calls them.
        varying: the names of tensors in ``held`` whose numbers have changed, so that nothing rests on them.
        settled: the conditions on sizes that Dynamo guards.
    """

    captured: Captured
    places: tuple[str, ...]
    held: dict[str, Callable[[], torch.Tensor | None]]
    others: int = 0
    results: Results = field(default_factory=Results)
    inside: Mapping[str, CapturedGraph] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)
    settled: frozenset[str] | None = None

    def note(self, inputs: Sequence[Any]) -> None:
        """Note which tensors a call reads that are no arguments."""
        self.held |= {n: _reference(t) for n, t in zip(self.places, inputs, strict=True) if n in self.held}

    def settle(self) -> None:
        """Note for which sizes the graph is: Dynamo makes its guards."""
        self.settled = frozenset(shape_guard(self.captured.graph.find_nodes(op="placeholder")).conditions)

    def given(self, call: Call, inputs: Sequence[Any], own: Mapping[str, Any]) -> tuple[Call, dict[str, Any]]:
        """Return all that a call gives the inputs of the graph, and what the graph reads that is not in ``own``.

        Args:
            call: its tensors are the first inputs; numbers that change from call to call come after them.
            inputs: Dynamo's.
            own: the model's parameters and buffers.
        """
        values = dict(zip(self.places, inputs, strict=True))
        names = [str(node.target) for node in self.captured.graph.find_nodes(op="placeholder")]
        numbers = (values[name] for name in names[len(call.tensors) :])
        outside = {name: values[name] for name in self.held if name in values and name not in own}
        return replace(call, tensors=(*call.tensors, *numbers)), outside

    def read(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what the graph reads that is no argument, as far as it is there and its numbers stay.

        Args:
            own: the model's parameters and buffers, as they are now.
        """
        read = {name: own.get(name, reference()) for name, reference in self.held.items() if name not in self.varying}
        return {name: tensor for name, tensor in read.items() if tensor is not None}


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return what gives a tensor as long as the model holds it; a number that Dynamo made a tensor for ever."""
    return weakref.ref(tensor) if tensor.ndim or isinstance(tensor, nn.Parameter) else lambda: tensor


_LOCK = re.compile(r"enter a `(?:lock|RLock|Condition|Semaphore)`")  # as Dynamo says that a lock breaks the graph


class _AsksError(BaseException):
    """The code that was just captured asks whether gradients are recorded."""


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method of an object that lives elsewhere: Dynamo's table of graphs hides from the garbage collector."""
    reference = weakref.WeakMethod(cast("Any", method))

    def call(*args: Any) -> Any:
        return cast("Any", reference())(*args)

    return call


def _run(of: weakref.ref[Captures], kept: weakref.ref[CapturedGraph], *inputs: Any) -> Any:
    runs, without, captures, graph = NOW.runs, NOW.without, of(), kept()
    if runs is None or captures is None or graph is None:
        raise RuntimeError("a captured graph runs inside of a call of a converted model alone")
    if without is None:
        return runs._run_graph(graph, inputs)
    if captures._asks:
        raise _AsksError
    with without():
        return runs._run_graph(graph, inputs)


def captured_graph(
    module: fx.GraphModule,
    inputs: list[Any],
    whole: frozenset[Any],
    paths: Mapping[int, str],
    modes: tuple[bool, ...],
    call: Call | None = None,
    *,
    is_whole: bool = True,
) -> CapturedGraph:
    """Turn a graph of Dynamo's into one that can be converted.

    Args:
        module: as Dynamo gives it to a backend.
        inputs: likewise.
        whole: functions that stay whole.
        paths: of modules, parameters and buffers, by their ``id``.
        modes: of the modules.
        call: the call in which the graph is captured, whose tensors have names; None: it is not known.
        is_whole: the graph is that of the whole call, and not one of several, whose inputs may be any.
    """
    from autocastfx.capture.dynamo_graph import aten_graph

    taken = set(paths.values())
    names = [f"{name}_" if name in taken else name for name in (call.structure.tensor_names() if call else ())]
    named = {id(tensor): name for tensor, name in zip(call.tensors if call else (), names, strict=True)}
    dynamo = aten_graph(module, inputs, whole, paths, [], named)
    device = device_among((*dynamo.tensors.values(), *inputs))
    if call is None or not is_whole:
        return _graph_of(dynamo, _ANY, (), (), {}, modes, device, whole, paths)
    values = dict(zip(dynamo.places, inputs, strict=True))
    return _graph_of(dynamo, call.structure, names, call.tensors, values, modes, device, whole, paths)


_ANY = CallStructure(pytree.tree_structure(()), ())


def paths_of(models: Iterable[nn.Module]) -> dict[int, str]:
    """Return the paths of modules, parameters and buffers, by their ``id``."""
    return {
        id(member): name
        for model in models
        for name, member in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    }


def _graph_of(
    dynamo: DynamoGraph,
    structure: CallStructure,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    values: Mapping[str, Any],
    modes: tuple[bool, ...],
    device: torch.device,
    whole: frozenset[Any],
    paths: Mapping[int, str],
) -> CapturedGraph:
    """Return a graph whose first inputs are the tensors of a call, by ``names``."""
    from autocastfx.capture.dynamo_graph import WholeCall, aten_graph

    graph, attributes = dynamo.graph, dynamo.attributes
    tensors_held = {**dynamo.tensors, **_read_globals(graph, values, names)}
    held = {name: _reference(tensor) for name, tensor in tensors_held.items()}
    others = _order_inputs(graph, names, tensors)
    for node in list(graph.find_nodes(op="get_attr")):  # where it is used, as gradients and dumps are in this order
        if node.users:
            min(node.users).prepend(node)
    inputs = list(graph.find_nodes(op="placeholder"))
    guard = shape_guard(inputs)
    captured = Captured(graph, attributes, structure, guard, modes, device)
    inside: dict[str, CapturedGraph] = {}
    for node in graph.nodes:
        if isinstance(node.target, WholeCall) and (again := node.target.recomputed) is not None:
            passed = [HeldTensor.of(one) if isinstance(one, fx.Node) else None for one in node.target.passed(node.args)]
            part = aten_graph(again, None, whole, paths, passed)
            inner = inside[node.name] = _graph_of(part, structure, (), (), {}, modes, device, whole, paths)
            lifted = fx.GraphModule(dict(part.attributes), lift(part.graph, inner.places))
            node.target = node.target.with_recomputed(lifted)
            note_inner_writes(node, lifted.graph, node.target.passed(node.args))
    return CapturedGraph(captured, tuple(dynamo.places), held, others, inside=inside)


def _read_globals(graph: fx.Graph, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read tensors that are none of the call's by ``get_attr``; return them."""
    outside: dict[str, torch.Tensor] = {}
    for node in graph.find_nodes(op="placeholder"):
        given = values.get(str(node.target))
        is_known = HELD in node.meta or not isinstance(given, FakeTensor)
        if isinstance(given, torch.Tensor) and is_known and node.target not in names:
            node.op = "get_attr"
            outside[str(node.target)] = given
    return outside


def _order_inputs(graph: fx.Graph, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> int:
    """Let the tensors of the call be the first inputs, and sizes of them be read from them.

    Returns:
        How many other inputs there are.
    """
    inputs = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    first = next(iter(graph.nodes))
    for name, tensor in zip(names, tensors, strict=True):
        if name in inputs:
            first.prepend(node := inputs.pop(name))
        else:  # which forward does not read
            with graph.inserting_before(first):
                node = graph.create_node("placeholder", name, name=name)
            set_value(node, FakeTensorMode().from_tensor(tensor))
        first = node.next
    sizes: dict[Any, tuple[fx.Node, int]] = {}
    for node in graph.find_nodes(op="placeholder"):
        abstract = value(node)
        for dim, size in enumerate(abstract.shape if isinstance(abstract, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, (node, dim))
    others, last = 0, next(reversed(graph.find_nodes(op="placeholder")), None)
    for node in inputs.values():
        abstract = value(node)
        is_size = isinstance(abstract, torch.SymInt) and bool(node.users)
        if is_size and last is not None and (place := sizes.get(abstract.node.expr)) is not None:
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
    """Return the hooks in a model and on every module, by their numbers; its own run around the graph."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    parts = [module for module in model.modules() if module is not model]
    named = [(id(module), kind, getattr(module, f"_{kind}_hooks")) for module in parts for kind in kinds]
    named += [(0, kind, getattr(nn.modules.module, f"_global_{kind}_hooks")) for kind in kinds]
    return frozenset((key, kind, number) for key, kind, hooks in named for number in hooks)


# Tell why a model is captured again, and that it is often.

_LOG = logging.getLogger("autocastfx")
MANY = 8  # graphs for one call structure, which are captured without a warning


def _tell_of_recapture(graphs: Sequence[Captured]) -> str:
    """Say why the last of the graphs was captured though there are others; warn, once, where they are many.

    Call this while Dynamo captures the last one. Returns the reason if there are others for these modes.
    """
    if len(graphs) == 1:
        return ""
    last, why = graphs[-1], _reason()
    _LOG.info("capturing variant %d: %s", len(graphs), why)
    if sum(one.structure == last.structure and one.training == last.training for one in graphs) == MANY + 1:
        warnings.warn(
            f"more than {MANY} variants were captured for the call ({last.structure}), each in seconds. The last one, "
            f"because {why}. Give the model fewer sizes or values, as by padding to a few lengths, or write that code "
            "so that one graph serves all; the logger autocastfx tells the reason of each capture.",
            ManyVariantsWarning,
            stacklevel=2,
        )
    return why if any(one.training == last.training for one in graphs[:-1]) else ""


def _reason() -> str:
    """Return the guard that the latest graph fails, and the line that made it, as Dynamo tells."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("recompile_reason"), str):
        frame = frame.f_back
    if frame is None:
        return "no graph fits"
    guard, _, line = str(frame.f_locals["recompile_reason"]).partition("\n")[0].partition("  # ")
    guard, line = re.sub(r"^[\d/]+: ", "", guard).strip(), re.sub(r"\s*\(HINT.*", "", line).strip()
    return f"it does not hold that {guard}{f' ({line})' if line else ''}"
