"""Keep some Python calls whole in a captured graph: custom autograd functions, and functions that an op list names.

A tracer goes into them, and silently loses a custom backward. Here each call becomes one node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import Shared

# torch's attention layers in evaluation without gradients: fused, and without the padded places of a sequence.


@contextmanager
def _attention_written_out() -> Generator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# While open, torch's attention layers call the operators that lists know, as under torch.compile and in training.
ATTENTION_WRITTEN_OUT = Shared(_attention_written_out)


class _Leaf(HigherOrderOperator):
    """A placeholder for a call that was not traced, until :func:`restore_leaves` puts the function in its place."""

    def __init__(self) -> None:
        super().__init__("autocastfx_leaf")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


LEAF = _Leaf()


class AutogradCall:
    """``function.apply`` as a callable with the function's name, which graphs can print, copy and pickle."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__module__, self.__name__ = function.__module__, function.__name__
        self.__qualname__ = function.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function's ``apply``."""
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AutogradCall) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return (AutogradCall, (self.function,))


def record_call(
    function: Callable[..., Any],
    run: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    called: list[Callable[..., Any]],
) -> Any:
    """Record a call of ``function`` as one node of the graph being traced, if one is; ``run`` computes it.

    ``function`` is added to ``called``. :func:`restore_leaves` puts it into the graph.
    """
    mode = get_proxy_mode()
    if mode is None:
        return run()
    tracer = mode.tracer
    proxies, named = pytree.tree_map(tracer.unwrap_proxy, (args, kwargs))
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():  # whose modes record switches of gradients
        result = run()
    called.append(function)
    proxy = tracer.create_proxy("call_function", LEAF, (len(called) - 1, *proxies), named)
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def restore_leaves(graph: fx.Graph, called: list[Callable[..., Any]]) -> None:
    """Replace each placeholder node of ``graph`` by a call of the function."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is LEAF:
            node.target, node.args = called[node.args[0]], node.args[1:]
            _erase_unread(node)


def _erase_unread(node: fx.Node) -> None:
    """Erase the members of a call's output that no node reads; tracing takes every member out of its tuple."""
    for member in list(node.users):
        if member.op == "call_function" and member.target is operator.getitem and member.args[0] is node:
            _erase_unread(member)
            if not member.users:
                member.graph.erase_node(member)
