"""Run a graph of Dynamo's that cannot be converted under torch.autocast, or in float32 where that fails."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx

from autocastfx.integrations.skipped_code import warn_of_failure

__all__ = ["autocast_as_before", "float32_where_it_fails", "graph_in_autocast"]

_LEVELS: Any = cast("Any", torch._C)._functorch


def graph_in_autocast(module: fx.GraphModule, kind: str, low: torch.dtype) -> fx.GraphModule:
    """Return a copy of ``module`` whose nodes run in a region of torch.autocast."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    region: fx.Node | None = None
    for node in module.graph.nodes:
        if region is None and node.op not in ("placeholder", "get_attr"):
            region = graph.call_function(torch.amp.autocast_mode._enter_autocast, (kind, low, True, None))
        if node.op == "output":
            graph.call_function(torch.amp.autocast_mode._exit_autocast, (region,))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


@contextmanager
def autocast_as_before(kind: str) -> Generator[None]:
    """Leave the regions of torch.autocast, and those of torch.func, that what fails inside has entered by itself."""
    depth, levels = _depth(), _LEVELS.get_dynamic_layer_stack_depth()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    try:
        yield
    except RuntimeError:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
        while _depth() > depth:
            torch.autocast_decrement_nesting()
        _LEVELS.pop_dynamic_layer_stack_and_undo_to_depth(levels)
        if not depth:
            torch.clear_autocast_cache()
        raise


def _depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def float32_where_it_fails(run: Callable[..., Any], exact: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return a call of ``run`` under torch.autocast, and of ``exact`` from its first failure on."""
    is_float32 = False

    def call(*inputs: Any) -> Any:
        nonlocal is_float32
        failure: RuntimeError | None = None
        if not is_float32:
            try:
                with autocast_as_before(kind):
                    return run(*inputs)
            except RuntimeError as error:
                failure = error
        with torch.autocast(kind, enabled=False):
            found = exact(*inputs)
        if failure is not None:
            is_float32 = True
            warn_of_failure("the graph", failure)
        return found

    return call
