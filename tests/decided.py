"""Run the passes on the traced operators of a model, without a capture.

``make_fx`` traces the operators in a tenth of the time that Dynamo needs to capture them. A test that looks at a graph
or a plan alone needs no more. What it gives knows no modules, and cannot be called: a test of rules for modules, of
numbers or of what ``convert`` does around the passes converts the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autocastfx.capture.masks import drop_settled
from autocastfx.capture.tidy import tidy
from autocastfx.options import Options
from autocastfx.passes.pipeline import ConvertedGraph
from tests.helpers import listing

Traced = tuple[fx.Graph, dict[str, Any], dict[str, torch.Tensor]]


def traced(model: Callable[..., Any], *inputs: Any) -> fx.Graph:
    """The operators that a function of tensors, or a module, calls."""
    return _traced(model, inputs)[0]


def _traced(model: Callable[..., Any], inputs: tuple[Any, ...]) -> Traced:
    """The graph, its constants, and the parameters and buffers that it reads."""
    held = dict[str, torch.Tensor]()
    if isinstance(model, nn.Module):
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def flat(*given: Any) -> tuple[Any, ...]:
        tensors, args = dict(zip(held, given, strict=False)), given[len(held) :]
        result = functional_call(model, tensors, args) if isinstance(model, nn.Module) else model(*args)
        return tuple(pytree.tree_leaves(result))

    names = [*held, *(f"args_{i}" for i in range(len(inputs)))]
    module = make_fx(flat, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*held.values(), *inputs)
    attributes: dict[str, Any] = {}
    graph = tidy(module, [], attributes, names, follows=True)
    drop_settled(graph, attributes)
    for node in graph.find_nodes(op="placeholder"):
        if node.target in held:
            node.op = "get_attr"
            next(iter(node.users), node).prepend(node)  # as a capture reads it
    return graph, attributes, held


def decided(model: Callable[..., Any], *inputs: Any, **options: Any) -> ConvertedGraph:
    """Trace a function of tensors, or a module, and run the passes with the options of ``convert``."""
    graph, attributes, held = _traced(model, inputs)
    device = next((t.device for t in (*held.values(), *inputs) if isinstance(t, torch.Tensor)), torch.device("cpu"))
    of_model = model if isinstance(model, nn.Module) else None
    chosen = Options(**options)
    converter = chosen.converter(of_model, chosen.target or device, lambda batches, lists: batches)
    mode = "train" if of_model is None or of_model.training else "eval"
    return converter.convert_graph(graph, attributes, held, chosen.target or device, mode=mode)


def rewritten(model: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """The listing of the converted operators of ``model``."""
    return listing(decided(model, *inputs, **{"dtype": torch.float16, **options}).graph)
