"""Shows the values of a converted model's calls to observers, node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

__all__ = ["Observer", "run_observed"]

Observer = Callable[[fx.Node, Any, Sequence[Any]], None]  # a node, the value that it gave, and those that it read


def run_observed(graph: fx.Graph, observers: Sequence[Observer], owner: nn.Module, *tensors: Any) -> Any:
    """Run a variant's ``graph`` as its function does, and call each observer after each node that computes.

    Args:
        graph: of a variant of ``owner``.
        observers: may keep the values, but not change them.
        owner: holds parameters and buffers.
        *tensors: of the call.
    """
    return _Observed(graph, observers, owner).run(*tensors, enable_io_processing=False)


class _Observed(fx.Interpreter):
    def __init__(self, graph: fx.Graph, observers: Sequence[Observer], owner: nn.Module) -> None:
        super().__init__(owner, graph=graph)
        self.extra_traceback = False
        self.observers = observers

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            read = [self.env[node] for node in n.all_input_nodes]
            for observe in self.observers:
                observe(n, result, read)
        return result
