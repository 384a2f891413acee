"""Clean up a traced graph for the passes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import eager_transforms, predispatch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from autocastfx.capture.kept_whole import LEAF, restore_leaves
from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.errors import CaptureError
from autocastfx.graph.alias import note_inner_writes
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import all_names, argument, attribute, dtypes, stand_for, subgraphs, value
from autocastfx.graph.walk import values_given


def tidy(
    module: fx.GraphModule,
    called: list[Any],
    attributes: dict[str, Any],
    inputs: Sequence[str] = (),
    *,
    follows: bool = False,
) -> fx.Graph:
    """Copy a traced graph, with inputs first and attributes read where they are used.

    Assertions and nodes that change nothing are dropped; with ``follows``, ``type_as`` stays. ``inputs`` names the
    placeholders. What ``get_attr`` nodes read is added to ``attributes``.
    """
    module = flatten_transforms(module)
    restore_leaves(module.graph, called)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = sorted(module.graph.nodes, key=lambda n: n.op != "placeholder")
    input_names = iter(inputs)

    def copy(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        if node.op == "get_attr":
            target = str(node.target)
            attributes[target] = _attribute(attribute(module, target), called, follows)
            copied = graph.create_node("get_attr", target, name=target.replace(".", "_"))
        elif node.op == "placeholder":
            given = next(input_names, None)
            name = given or _as_argument(re.sub(r"^[a-z]_(module_)?", "", node.name))
            copied = graph.create_node("placeholder", name, name=name)
            copied.target = given or copied.name  # what is left of two names may be the same
        elif callable(node.target) and node.name.startswith(LEAF.name()):
            args, kwargs = map_arg((node.args, node.kwargs), copy)
            name = of_function(node.target).rpartition(".")[2]
            copied = graph.create_node("call_function", node.target, args, kwargs, name=name)
        else:
            copied = graph.node_copy(node, copy)
        copied.meta.update(node.meta)
        _clean_stack(copied)
        copies[node] = copied
        return copied

    for node in nodes:
        if node.op == "output":
            graph.output(map_arg(node.args[0], copy))
        elif node.op != "get_attr" and op_name(node) != "_assert_tensor_metadata":  # which bakes in dtype and device
            source = no_op_source(node, follows=follows)
            copies[node] = copy(node if source is None else source)
            if source is not None:
                stand_for(copies[node], node.name)
    for node in graph.nodes:
        for inside in subgraphs(node, attributes).values():
            note_inner_writes(node, inside.graph)
    _name_members(graph, attributes)
    return graph


# Replace the code inside transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp``) by operators on whole tensors.
#
# Dynamo records that a transform begins, what it calls on tensors of its own, and that it ends. Such
# a graph cannot be run node by node, and one that fails between leaves the transform open for the whole process.

_autograd: Any = cast("Any", torch._C)._autograd
_functorch: Any = cast("Any", torch._C)._functorch
_transforms: Any = eager_transforms
_own: Any = torch._C


def _recorded(name: str, owner: Any) -> Any:
    """Return what a tracer records: torch's Python function, or, before torch 2.13, its own."""
    return getattr(predispatch, name, None) or getattr(owner, name)


_ENTER = tuple(_recorded(f"_{name}_increment_nesting", _functorch) for name in ("vmap", "jvp", "grad"))
_EXIT = tuple(_recorded(f"_{name}_decrement_nesting", _functorch) for name in ("vmap", "jvp", "grad"))
_ENTER_DUAL, _EXIT_DUAL = (_recorded(f"_{name}_dual_level", _own) for name in ("enter", "exit"))
# What Python does around a transform: of no use without it.
_AROUND = (
    *(_autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable, torch._C._set_fwd_grad_enabled),
    *(predispatch.lazy_load_decompositions, cast("Any", forward_ad)._maybe_load_decompositions),
)


def flatten_transforms(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph whose values are whole tensors, where ``module`` computes inside transforms of ``torch.func``.

    torch's tracer records no operator before the transform has been applied to it, so that what is recorded are
    operators below autograd, such as ``mm`` for ``linear``.

    Args:
        module: of Dynamo; its nodes hold examples of their values. It stays as it is.

    Raises:
        CaptureError: code inside a transform switches gradients or autocast, or calls a function with a backward of its
            own, which would be lost.
    """
    if not any(node.target in _ENTER for node in module.graph.nodes):
        return module
    examples = (_example(node) for node in module.graph.nodes)
    mode = next((one.fake_mode for one in examples if isinstance(one, FakeTensor)), None) or FakeTensorMode()
    root = fx.GraphModule(module, module.graph)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    is_differentiated = True
    for node, *rest in _regions(list(module.graph.nodes)):
        if rest:
            _check([node, *rest], is_differentiated)
            _flatten(root, [node, *rest], mode, graph, copies)
            continue
        if node.target is torch._C._set_grad_enabled:
            is_differentiated = bool(node.args[0])
        if node.target not in _AROUND:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(root, graph)


def _regions(nodes: Sequence[fx.Node]) -> Iterator[Sequence[fx.Node]]:
    """Yield the nodes in order: those of one outermost transform at once, the others one by one.

    The function that ``torch.func.vjp`` gives is called when the transform has ended, and needs what it computed.
    """
    begin = 0
    while begin < len(nodes):
        end, depth = len(nodes), 0  # all that follows, where one does not end
        for i, node in enumerate(nodes[begin:], begin):
            depth += (node.target in _ENTER) - (node.target in _EXIT)
            if depth == 0:
                end = i + 1
                break
        inside = set(nodes[begin:end])
        for i, node in enumerate(nodes[end:], end) if len(inside) > 1 else ():
            if node.target is _transforms._autograd_grad and not inside.isdisjoint(node.all_input_nodes):
                end = i + 1
                inside = set(nodes[begin:end])
        yield nodes[begin:end]
        begin = end


def _check(region: Sequence[fx.Node], is_differentiated: bool) -> None:
    if sum((node.target in _ENTER) - (node.target in _EXIT) for node in region) != 0:
        raise CaptureError("code inside torch.vmap, or another transform of torch.func, breaks the graph")
    depth = 0  # of transforms that differentiate: they switch gradients on for themselves
    for node in region:
        depth += node.target is _functorch._grad_increment_nesting
        switches = (
            node.target is torch._C._set_grad_enabled
            and bool(node.args[0]) != is_differentiated
            and not (node.args[0] and depth)
        )
        if switches or node.target is torch.amp.autocast_mode._enter_autocast:
            raise CaptureError(
                "code inside torch.vmap, or another transform of torch.func, switches gradients or autocast"
            )
        if isinstance(node.target, HigherOrderOperator):
            raise CaptureError(
                "code inside torch.vmap, or another transform of torch.func, calls a torch.autograd.Function, "
                "activation checkpointing, or another operator with code of its own"
            )


class _Run(fx.Interpreter):
    """Runs a region, and leaves no level of forward-mode differentiation open: such a level is the whole process's."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.open: int | None = None
        try:
            return super().run(*args, **kwargs)
        finally:
            if self.open is not None:
                torch._C._exit_dual_level(level=self.open)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is _ENTER_DUAL:
            self.open = result
        elif target is _EXIT_DUAL:
            self.open = None
        return result


def _flatten(
    root: fx.GraphModule, region: Sequence[fx.Node], mode: FakeTensorMode, graph: fx.Graph, copies: dict[fx.Node, Any]
) -> None:
    """Add what a region computes to ``graph``, its constants to ``root``, and its results to ``copies``."""
    inside = set(region)
    inputs = list(dict.fromkeys(one for node in region for one in node.all_input_nodes if one not in inside))
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    batched = fx.Graph()
    batched_nodes = {node: batched.placeholder(node.name) for node in inputs}
    for node in region:
        batched_nodes[node] = batched.node_copy(node, batched_nodes.__getitem__)
    batched.output(tuple(batched_nodes[node] for node in outputs))
    run = _Run(fx.GraphModule(root, batched)).run
    with mode, enable_python_dispatcher(), torch._C._DisableAutocast(), random_numbers_kept():
        traced: fx.GraphModule = cast("Any", make_fx)(run)(*(_example(node) for node in inputs))
    traced.graph.eliminate_dead_code()
    given = iter(inputs)
    made: dict[fx.Node, Any] = {}
    first = next(node for node in region if node.target in _ENTER)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            made[node] = copies[next(given)]
        elif node.op == "output":
            copies.update(zip(outputs, fx.map_arg(node.args[0], made.__getitem__), strict=True))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
            if node.op == "get_attr":
                made[node].target = f"{first.name}_{node.target}"
                setattr(root, made[node].target, getattr(traced, str(node.target)))
            made[node].meta["nn_module_stack"] = first.meta.get("nn_module_stack", {})
            made[node].meta["stack_trace"] = first.meta.get("stack_trace")


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


_END = 2**63 - 1  # where torch ends a slice without an end
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def _name_members(graph: fx.Graph, attributes: dict[str, Any]) -> None:
    """Note which value of a region each member of what it gives is: ``region/name``."""
    for node in graph.nodes:
        for target, module in subgraphs(node, attributes).items():
            output = module.graph.output_node().args[0]
            given = output if isinstance(output, (tuple, list)) else ()
            outside = values_given(node, module.graph)
            for user in (user for user in node.users if op_name(user) == "getitem" and user.args[1] < len(given)):
                member = given[user.args[1]]
                if isinstance(member, fx.Node):
                    through = outside.get(member)
                    inner, *others = all_names(member)
                    own = (f"{target}/{inner}",) if through is None else all_names(through)
                    stand_for(user, *own, *(f"{target}/{name}" for name in others))


def _as_argument(name: str) -> str:
    """Return a name that generated code can give an argument: that of a tensor in module ``0`` begins with a digit."""
    return name if name.isidentifier() else f"_{name}"


def _attribute(original: Any, called: list[Any], follows: bool) -> Any:
    if not isinstance(original, fx.GraphModule):
        return original.detach() if isinstance(original, torch.Tensor) else original
    inner: dict[str, Any] = {}
    graph = tidy(original, called, inner, follows=follows)
    return fx.GraphModule(inner, graph)


def no_op_source(node: fx.Node, *, follows: bool = False) -> fx.Node | None:
    """Return the input of a node that changes nothing.

    It is an alias or a slice of everything, which is a tensor of its own where it is given out; dropout of nothing or
    in evaluation, ``type_as`` of equal dtypes, or the detaching of a constant's copy (``torch.tensor``), which has no
    history.
    """
    name, reads = op_name(node), node.all_input_nodes
    is_given_out = any(user.op == "output" for user in node.users)
    changes_nothing = (
        ((name == "alias" or (name == "slice" and _takes_all(node))) and not is_given_out)
        or (name in _DROPOUTS and (argument(node, "train") is False or argument(node, "p") == 0))
        or (name == "type_as" and not follows and value(node) is not None and dtypes(reads[0]) == dtypes(node))
        or (node.target is torch.ops.aten.detach_.default and op_name(reads[0]) == "lift_fresh_copy")
    )
    return reads[0] if changes_nothing else None


def _takes_all(node: fx.Node) -> bool:
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= _END)) and step in (None, 1)


def _clean_stack(node: fx.Node) -> None:
    """Leave out of module paths what is no module of the model."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    inner = {
        key: (path, kind)
        for key, (path, kind) in stack.items()
        if path and path != "_empty_nn_module_stack_from_metadata_hook"  # torch's own stand-in
    }
    if stack:
        node.meta["nn_module_stack"] = inner
