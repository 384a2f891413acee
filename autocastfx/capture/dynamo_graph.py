"""Turn a graph of Dynamo, as a compiler backend gets it, into the kind of graph that the passes take."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._export.passes.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import grad_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import checkpoint

from autocastfx.capture.data_writes import READS, data, keeps_form, set_data
from autocastfx.capture.kept_whole import AutogradCall, record_call
from autocastfx.capture.leave_intact import is_in_autocast, random_numbers_kept
from autocastfx.capture.masks import drop_settled
from autocastfx.capture.tidy import flatten_transforms, tidy
from autocastfx.capture.user_casts import is_noted, keeping_floats, run_cast
from autocastfx.dtypes import LOW_DTYPES
from autocastfx.errors import CaptureError, UnsupportedError
from autocastfx.graph.alias import alias_sets, storage_of
from autocastfx.graph.names import op_name
from autocastfx.graph.node import HELD, HeldTensor, attributes_of, line_of

# Operators with graphs of their own that are called whole: tracing into them would lose a custom backward, a hook, or
# the recomputation. Of the latter the graph is converted by itself.
_RECOMPUTED = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_CONTEXTS = "_checkpoint_context_fn"  # in the meta of Dynamo's graph: which results are kept, and not recomputed


def _enter_inference_mode(mode: bool) -> bool:
    """Switch gradients off, or on for False, as inference mode does, and return whether they were on."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(not mode)
    return before


# What stands for a function that a graph cannot hold as it is.
REPAIRS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(READS, data),
    grad_mode._enter_inference_mode: _enter_inference_mode,
    grad_mode._exit_inference_mode: torch._C._set_grad_enabled,
}
_VARYING = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)  # inputs of a graph, and no constants
_HOOK = "register_hook"  # a tensor's, whose function is a graph
_WHOLE = ("autograd_function_apply", _HOOK, *_RECOMPUTED)


@dataclass(frozen=True)
class DynamoGraph:
    """A graph of ATen operators for one graph of Dynamo.

    Attributes:
        graph: takes Dynamo's inputs, but parameters and buffers, which ``get_attr`` nodes read; returns a flat tuple.
        attributes: constants and sub-graphs, by ``get_attr`` target.
        tensors: parameters and buffers, by ``get_attr`` target.
        places: the number of each input of Dynamo's graph, by the name of its placeholder or its ``get_attr`` target.
        held: the inputs that the model holds, by the same names.
    """

    graph: fx.Graph
    attributes: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, int]
    held: Mapping[str, HeldTensor]


def aten_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any] | None,
    whole: Collection[Any],
    paths: Mapping[int, str],
    passed: Sequence[HeldTensor | None],
    arguments: Mapping[int, str] | None = None,
) -> DynamoGraph:
    """Trace Dynamo's graph to ATen operators, on the abstract tensors that Dynamo made it with.

    Args:
        module: calls functions and methods of torch; sizes may be among its inputs. It stays as it is.
        inputs: what Dynamo gives a backend: parameters, and examples of the other inputs. For a graph inside another,
            None: its placeholders hold examples.
        whole: functions that stay whole, as far as Dynamo has left them so.
        paths: of modules, parameters and buffers of the model, by their ``id``. Dynamo knows others by where it found
            them, which is no path behind a break of the graph.
        passed: for a graph inside another, what the other passes to each input that the model holds.
        arguments: names of the call's tensors by their ``id``; others are named by where Dynamo found them.

    Raises:
        CaptureError: a hook comes after a use of its tensor, or a constant has no values.
        UnsupportedError: a tensor has two hooks, whose order this torch's compiler turns round.
    """
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta["example_value"] for node in given] if inputs is None else inputs
    _refuse_late_hooks(module)
    _refuse_two_hooks(module)
    held = passed or [_held(node, value, paths) for node, value in zip(given, inputs, strict=True)]
    names = _names(given, held, [(arguments or {}).get(id(value), "") for value in inputs])
    traced, called = _traced(module, given, inputs, whole, names)
    attributes: dict[str, Any] = {}
    root = _root(given, inputs, paths)
    for one in traced.modules():
        for node in one.graph.nodes if isinstance(one, fx.GraphModule) else ():
            _name_modules(node, paths, root)
    graph = tidy(traced, called, attributes, names, follows=True)  # a conversion drops what it need not follow
    for node in reversed(graph.nodes):  # Dynamo has read numbers that are known while it captured
        if op_name(node) == "item" and not node.users:
            graph.erase_node(node)
    drop_settled(graph, attributes)
    _detach_unwritten(graph)
    _check_constants(attributes)
    by_name = {name: one for name, one in zip(names, held, strict=True) if one is not None}
    has_values = {
        name: one
        for name, one in zip(names, inputs, strict=True)
        if isinstance(one, nn.Parameter) or (name in by_name and (id(one) in paths or not isinstance(one, FakeTensor)))
    }
    for node in graph.find_nodes(op="placeholder"):
        if (one := by_name.get(str(node.target))) is not None:
            node.meta[HELD] = one
        if node.target in has_values:
            node.op = "get_attr"
    return DynamoGraph(graph, attributes, has_values, {name: i for i, name in enumerate(names)}, by_name)


def _detach_unwritten(graph: fx.Graph) -> None:
    """Replace ``x.data`` by ``x.detach()``, which lists know, if nothing writes into the storage."""
    reads = [node for node in graph.nodes if node.target is data]
    written = alias_sets(graph) if reads else {}
    for node in reads:
        if node not in written and graph.output_node() not in node.users:
            node.target = torch.ops.aten.detach.default


def _check_constants(attributes: Mapping[str, Any]) -> None:
    """Refuse a graph with constants that have no values: what made them was not recorded.

    Raises:
        CaptureError: there is one.
    """
    for constant in attributes.values():
        if isinstance(constant, FakeTensor):
            raise CaptureError(
                f"the values of a tensor of size {list(constant.shape)} come from code that is not recorded"
            )
        if isinstance(constant, fx.GraphModule):
            _check_constants(attributes_of(constant, constant.graph))


def _refuse_late_hooks(module: fx.GraphModule) -> None:
    """Refuse a hook on a tensor that was read before: what reads a copy in another dtype would not pass the hook.

    Raises:
        CaptureError: there is one.
    """
    for node in module.graph.nodes:
        is_hook = isinstance(node.target, HigherOrderOperator) and node.target.name() == _HOOK
        if is_hook and _is_read_before(node.args[0], node):
            at = f", at {line}" if (line := line_of(node)) else ""
            raise CaptureError(f"forward registers a hook on a tensor after the tensor was used{at}")


def _is_read_before(read: fx.Node, node: fx.Node) -> bool:
    """True if a gradient comes to ``read`` through a reader before ``node``."""
    readers = (user for user in read.users if user.target not in READS)
    return any(user < node and op_name(user).partition(".")[0] not in _NO_READERS for user in readers)


_NO_READERS = ("detach", "sym_size", "output")  # no gradient comes through them


def _refuse_two_hooks(module: fx.GraphModule) -> None:
    """Refuse two hooks on one tensor with torch 2.11: its Dynamo makes autograd functions of them, the last one first.

    Raises:
        UnsupportedError: there are two.
    """

    def is_hook(node: fx.Node) -> bool:
        return op_name(node) == "autograd_function_apply" and "register_hook" in line_of(node)

    for node in module.graph.nodes:
        made_by = [one.args[0] if one.target is operator.getitem else one for one in node.all_input_nodes]
        if is_hook(node) and any(isinstance(one, fx.Node) and is_hook(one) for one in made_by):
            raise UnsupportedError(
                f"forward registers two hooks on one tensor, at {line_of(node)}, and torch {torch.__version__} calls "
                "the last one first when it compiles: register one hook that does both, or update torch."
            )


# ---- names -----------------------------------------------------------------------------------------------------------


def _names(given: Sequence[fx.Node], held: Sequence[HeldTensor | None], arguments: Sequence[str]) -> list[str]:
    """Name the inputs as the model and its signature do, or by where Dynamo found them."""
    names: list[str] = []
    for node, one, argument in zip(given, held, arguments, strict=True):
        name = one.path if one is not None else argument or _path(_source(node))
        if one is None or not re.fullmatch(r"[\w.]+", name):
            name = re.sub(r"\W|^(?=\d)", "_", name)  # an argument of Python
            name = f"{name}_" if keyword.iskeyword(name) else name
        name = name or node.name
        while name in names:
            name += "_"
        names.append(name)
    return names


def _held(node: fx.Node, value: object, paths: Mapping[int, str]) -> HeldTensor | None:
    """Return what an input of Dynamo's graph is in the model; None if the model does not hold it."""
    source = _source(node)
    is_held = id(value) in paths or "_parameters[" in source or "_buffers[" in source
    if not isinstance(value, torch.Tensor) or not is_held:
        return None
    kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
    return HeldTensor(kind, paths.get(id(value)) or _path(source))


def _source(node: fx.Node) -> str:
    """Return Dynamo's expression for where it found an input; empty if it found it nowhere."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source.name if source is not None else ""


def _root(given: Sequence[fx.Node], inputs: Sequence[Any], paths: Mapping[int, str]) -> str:
    """Return the path of the module whose code Dynamo has captured, if that was called by itself; else empty."""
    for node, value in zip(given, inputs, strict=True):
        inside = f".{_path(_source(node))}"
        known = paths.get(id(value), "")
        if _source(node).startswith("L['self']") and known.endswith(inside):
            return known.removesuffix(inside)
    return ""


def _name_modules(node: fx.Node, paths: Mapping[int, str], root: str) -> None:
    """Let the module paths of ``node`` be those of ``named_modules`` of the compiled module."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or ({"": (root, nn.Module)} if root else {})
    if stack:
        node.meta["nn_module_stack"] = {
            key: (paths.get(_module_id(key), _path(path)), kind) for key, (path, kind) in stack.items()
        }


def _module_id(key: str) -> int:
    """Return the ``id`` of a module in Dynamo's stack of modules; -1 if its key there is another."""
    number = key.partition("@")[0]  # a second call of the module has a number of its own
    return int(number) if number.isdecimal() else -1


def _path(source: str) -> str:
    """Turn an expression of Dynamo, as ``L['self']._modules['fc']._parameters['weight']``, into ``fc.weight``."""
    source = re.sub(r"^.*\.__func__\.(?:__closure__\[\d+\]\.cell_contents\.?)?", "", source)  # what a function reads
    path: str = re.sub(r"\.?_(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    return re.sub(r"^L\.((self|fn)(?=\.|$))?\.?", "", path)


# ---- tracing ---------------------------------------------------------------------------------------------------------


class WholeCall:
    """A higher-order operator and its graphs as one callable of tensors."""

    def __init__(self, operator: HigherOrderOperator, arguments: Sequence[Any]) -> None:
        self.operator = operator
        self.arguments = [None if isinstance(one, _VARYING) else (one,) for one in arguments]
        self.__name__ = self.__qualname__ = operator.name()

    @property
    def recomputed(self) -> fx.GraphModule | None:
        """The graph that runs again in backward, of activation checkpointing."""
        first = self.arguments[0] if self.operator.name() in _RECOMPUTED else None
        return first[0] if first is not None and isinstance(first[0], fx.GraphModule) else None

    def passed(self, args: Sequence[Any]) -> list[Any]:
        """Return what a call with ``args`` passes to each input of the graph that runs again."""
        rest = iter(args)
        return [next(rest) if one is None else one[0] for one in self.arguments][1:]

    def with_recomputed(self, module: fx.GraphModule) -> WholeCall:
        """The same call, of another graph that takes the same inputs."""
        if self.recomputed is not None and _CONTEXTS in self.recomputed.meta:
            module.meta[_CONTEXTS] = self.recomputed.meta[_CONTEXTS]
        call = WholeCall(self.operator, ())
        call.arguments = [(module,), *self.arguments[1:]]
        return call

    def __call__(self, *tensors: Any, **kwargs: Any) -> Any:
        """Call the operator with ``tensors`` among its other arguments."""
        rest = iter(tensors)
        arguments = [next(rest) if one is None else one[0] for one in self.arguments]
        if self.recomputed is not None and TracingContext.try_get() is None:
            # No compiler is there to see to it: torch 2.11 would keep all, torch 2.13 draw other random numbers again.
            contexts = {"context_fn": self.recomputed.meta[_CONTEXTS]} if _CONTEXTS in self.recomputed.meta else {}
            return checkpoint(*arguments, **kwargs, **contexts)
        if self.operator.name() == _HOOK and not arguments[0].requires_grad:
            return arguments[0]  # an abstract run has no gradients
        return self.operator(*arguments, **kwargs)


class _Tracer(fx.Interpreter):
    """Runs Dynamo's graph, and records some operators whole."""

    def __init__(self, module: fx.GraphModule, called: list[Callable[..., Any]], whole: Collection[Any]) -> None:
        super().__init__(module)
        self.called, self.whole = called, whole
        self._node: Any = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_noted(self._node):
            return run_cast(self._node, getattr(torch.Tensor, target), args, kwargs, self.env)
        with self._floats(args, kwargs):
            return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HigherOrderOperator) and target.name() in _WHOLE:
            whole = WholeCall(target, args)
            tensors = tuple(one for one, fixed in zip(args, whole.arguments, strict=True) if fixed is None)
            return record_call(whole, partial(target, *args, **kwargs), tensors, kwargs, self.called)
        if (repair := REPAIRS.get(target)) is not None:
            return repair(*args, **kwargs)
        if target is torch.Tensor.set_ and self._is_read(args[0]) and keeps_form(*args):
            target = set_data  # Dynamo writes ``x.data = new`` so, and lowers x's version, which no tracer sees
        if isinstance(target, AutogradCall) or target in self.whole:
            return record_call(target, partial(target, *args, **kwargs), args, kwargs, self.called)
        if is_noted(self._node):
            return run_cast(self._node, target, args, kwargs, self.env)
        with self._floats(args, kwargs):
            return super().call_function(target, args, kwargs)

    def _is_read(self, x: torch.Tensor) -> bool:
        """True if backward, or what follows in the graph, may read what ``x`` holds until now."""
        storage = storage_of(x)
        others = (one for one in self.env.values() if isinstance(one, torch.Tensor) and one is not x)
        is_held = any(storage_of(one) == storage for one in others)
        return is_held or not x.is_leaf or _is_read_before(self._node.args[0], self._node)

    def _floats(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[object]:
        has_numbers = any(isinstance(one, torch.SymFloat) for one in (*args, *kwargs.values()))
        return keeping_floats(partial(record_call, called=self.called)) if has_numbers else nullcontext()


def _traced(
    module: fx.GraphModule,
    given: Sequence[fx.Node],
    inputs: Sequence[Any],
    whole: Collection[Any],
    names: Sequence[str],
) -> tuple[fx.GraphModule, list[Callable[..., Any]]]:
    values = [node.meta.get("example_value", value) for node, value in zip(given, inputs, strict=True)]
    called: list[Callable[..., Any]] = []
    widened = _cast_by_autocast(module, inputs)

    def run(*args: Any) -> tuple[Any, ...]:
        with preserve_node_meta():
            given = (arg.float() if is_cast else arg for arg, is_cast in zip(args, widened, strict=True))
            outputs: Any = _Tracer(flat, called, whole).run(*given)
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

    modes = (cast("Any", value).fake_mode for value in values if isinstance(value, FakeTensor))
    mode: FakeTensorMode = next(modes, None) or FakeTensorMode()
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    flat = flatten_transforms(module)
    context = tracing(TracingContext(mode))  # Dynamo's has another mode, in which torch 2.11 would trace branches
    before = torch.is_grad_enabled()
    try:
        with context, mode, enable_python_dispatcher(), torch._C._DisableAutocast(), random_numbers_kept():
            traced: fx.GraphModule = cast("Any", make_fx)(run, pre_dispatch=True)(*values)
        if torch.is_grad_enabled() != before:
            raise CaptureError(
                f"forward leaves gradients switched {'off' if before else 'on'} for the code behind its call, which a "
                "graph does not. Write torch.no_grad() or torch.enable_grad() as a with statement, or as a decorator."
            )
    finally:
        torch._C._set_grad_enabled(before)
        mode.allow_non_fake_inputs = allowed
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(name.replace(".", "_"))  # so that the graphs of regions have the names, too
    for regions in (replace_set_grad_with_hop_pass, replace_autocast_with_hop_pass):
        traced, _ = regions(traced, None)
    written = alias_sets(traced.graph) if any(widened) else {}
    placeholders = (node for node in traced.graph.nodes if node.op == "placeholder")
    if any(is_cast and node in written for node, is_cast in zip(placeholders, widened, strict=True)):
        raise CaptureError("forward writes into a 16-bit input, in a region of torch.autocast around the call")
    return traced, called


def _cast_by_autocast(module: fx.GraphModule, inputs: Sequence[Any]) -> list[bool]:
    """Return which inputs are 16-bit where the parameters are not: a caller's torch.autocast casts both, a graph none.

    In float32 they fit the parameters, and passes decide on the precision. Graphs inside know the dtype that they had.
    """
    if any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes):
        return [False] * len(inputs)
    parameters = [one for one in inputs if isinstance(one, nn.Parameter)]
    is_cast = any(one.dtype == torch.float32 and is_in_autocast(one.device.type) for one in parameters)
    given = (isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter) for one in inputs)
    return [is_cast and is_given and one.dtype in LOW_DTYPES for one, is_given in zip(inputs, given, strict=True)]
