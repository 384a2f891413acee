"""Replace the code inside transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp``) by operators on whole tensors.

Dynamo and torch.export record that a transform begins, what it calls on tensors of its own, and that it ends. Such a
graph cannot be run node by node, and one that fails between leaves the transform open for the whole process.
"""

from __future__ import annotations

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

from autocastfx.errors import CaptureError

__all__ = ["flatten_transforms"]

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
        module: of Dynamo or torch.export; its nodes hold examples of their values. It stays as it is.

    Raises:
        CaptureError: code inside a transform switches gradients or autocast, or calls a function with a backward of its
            own, which would be lost.
    """
    if not any(node.target in _ENTER for node in module.graph.nodes):
        return module
    held = (_example(node) for node in module.graph.nodes)
    mode = next((one.fake_mode for one in held if isinstance(one, FakeTensor)), None) or FakeTensorMode()
    root = fx.GraphModule(module, module.graph)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    is_differentiated = True
    for region in _regions(list(module.graph.nodes)):
        if not any(node.target in _ENTER for node in region):
            (node,) = region
            if node.target is torch._C._set_grad_enabled:
                is_differentiated = bool(node.args[0])
            if node.target not in _AROUND:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            _check(region, is_differentiated)
            _flatten(root, region, mode, graph, copies)
    return fx.GraphModule(root, graph)


def _regions(nodes: Sequence[fx.Node]) -> Iterator[Sequence[fx.Node]]:
    """Yield the nodes in order: those of one outermost transform at once, the others one by one.

    The function that ``torch.func.vjp`` gives is called when the transform has ended, and needs what it computed.
    """
    begin = 0
    while begin < len(nodes):
        end, depth = begin, 0
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
    held = {node: batched.placeholder(node.name) for node in inputs}
    for node in region:
        held[node] = batched.node_copy(node, held.__getitem__)
    batched.output(tuple(held[node] for node in outputs))
    run = _Run(fx.GraphModule(root, batched)).run
    with mode, enable_python_dispatcher(), torch._C._DisableAutocast(), torch.random.fork_rng(devices=[]):
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
