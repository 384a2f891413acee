"""Replace the batched code of ``torch.vmap`` in Dynamo's graphs by operators on whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autocastfx.errors import CaptureError

__all__ = ["flatten_vmap"]

_ENTER, _EXIT = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
_SWITCHES = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast)


def flatten_vmap(module: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """Return a graph whose values are whole tensors, where ``module`` computes on batches inside ``torch.vmap``.

    torch's tracer records no operator before vmap has applied it to the batch, so that what is recorded are operators
    below autograd, such as ``mm`` for ``linear``.

    Args:
        module: Dynamo's, whose nodes hold examples of their values. It stays as it is.
        mode: of these examples.

    Raises:
        CaptureError: code inside vmap switches gradients or autocast, which would be lost.
    """
    if not any(node.target is _ENTER for node in module.graph.nodes):
        return module
    root = fx.GraphModule(module, module.graph)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for region in _regions(module.graph):
        if region[0].target is not _ENTER:
            (node,) = region
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif any(node.target in _SWITCHES for node in region):
            raise CaptureError("code inside torch.vmap switches gradients or autocast")
        else:
            _flatten(root, region, mode, graph, copies)
    return fx.GraphModule(root, graph)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the nodes in order: those of one outermost vmap at once, the others one by one."""
    region, depth = list[fx.Node](), 0
    for node in graph.nodes:
        depth += (node.target is _ENTER) - (node.target is _EXIT)
        region.append(node)
        if depth == 0:
            yield region
            region = []


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
    run = fx.Interpreter(fx.GraphModule(root, batched)).run
    with mode, enable_python_dispatcher(), torch._C._DisableAutocast(), torch.random.fork_rng(devices=[]):
        traced: fx.GraphModule = cast("Any", make_fx)(run)(*(node.meta["example_value"] for node in inputs))
    traced.graph.eliminate_dead_code()
    given = iter(inputs)
    made: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            made[node] = copies[next(given)]
        elif node.op == "output":
            copies.update(zip(outputs, fx.map_arg(node.args[0], made.__getitem__), strict=True))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
            if node.op == "get_attr":
                made[node].target = f"{region[0].name}_{node.target}"
                setattr(root, made[node].target, getattr(traced, str(node.target)))
            made[node].meta["nn_module_stack"] = region[0].meta.get("nn_module_stack", {})
            made[node].meta["stack_trace"] = region[0].meta.get("stack_trace")
