"""Keep some Python calls whole in a captured graph: custom autograd functions, and functions that an op list names.

Export would trace into them and silently lose a custom backward. Here each call becomes one node.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import Shared, patched_here
from autocastfx.errors import CaptureError
from autocastfx.graph.names import located

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


@contextmanager
def padding_noted() -> Generator[list[nn.TransformerEncoder]]:
    """Note the encoders that are called with a padding mask, and may leave 0 in the padded places of their output."""
    encoders: list[nn.TransformerEncoder] = []
    forward: Any = nn.TransformerEncoder.forward

    def noted(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
        if src_key_padding_mask is not None and mask is None and self.use_nested_tensor and not self.training:
            encoders.append(self)
        return forward(self, src, mask, src_key_padding_mask, is_causal)

    with patched_here(nn.TransformerEncoder, "forward", noted):
        yield encoders


class _Leaf(HigherOrderOperator):
    """A placeholder for a call that was not traced, until :func:`restore_leaves` puts the function in its place."""

    def __init__(self) -> None:
        super().__init__("autocastfx_leaf")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


LEAF = _Leaf()
# The function of torch.utils.checkpoint behind non-reentrant `checkpoint`: from torch 2.15 on the first of these.
_CHECKPOINTS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
CHECKPOINT = next(name for name in _CHECKPOINTS if hasattr(torch.utils.checkpoint, name))


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


@contextmanager
def whole_calls(functions: Iterable[str]) -> Generator[list[Callable[..., Any]], None, None]:
    """While open, record calls of custom autograd functions and of ``functions`` (dotted paths) as single nodes.

    Yields the list of functions called; a node's first argument is its index there. Activation checkpointing, which a
    graph cannot hold, raises :class:`CaptureError`. Calls of other threads are unchanged; only one thread at a time may
    have this open.
    """
    called: list[Callable[..., Any]] = []
    method: Any = inspect.getattr_static(torch.autograd.Function, "apply")  # written in Python; from torch 2.15 on in C

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch.utils.checkpoint":
            refuse_checkpoint()
        original: Any = method.__get__(None, cls)
        if cls.__module__.split(".")[0] == "torch":
            return original(*args, **kwargs)
        return record_call(AutogradCall(cls), partial(original, *args, **kwargs), args, kwargs, called)

    with ExitStack() as stack:
        stack.enter_context(patched_here(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(patched_here(torch.utils.checkpoint, CHECKPOINT, refuse_checkpoint))
        for owner, attribute, function in places(functions):
            whole = partial(_call_whole, function, called)
            patched = staticmethod(whole) if isinstance(owner, type) else whole
            stack.enter_context(patched_here(owner, attribute, patched))
        yield called


def places(paths: Iterable[str]) -> list[tuple[Any, str, Any]]:
    """Return (module or class, name, function) for each name of the functions ``paths`` in loaded modules.

    A function has several names if modules import it (``from ops import fused``). Static methods are found in their
    class.
    """
    bindings: list[tuple[Any, str, Any]] = []
    wanted: dict[int, Any] = {}
    for path in paths:
        owner, function, attribute = located(path.rpartition(".")[0]), located(path), path.rpartition(".")[2]
        if isinstance(owner, type):
            if isinstance(inspect.getattr_static(owner, attribute, None), staticmethod):
                bindings.append((owner, attribute, function))
        elif callable(function) and not isinstance(function, type):
            wanted[id(function)] = function
    modules = {id(module): module for module in sys.modules.values()} if wanted else {}
    for module in modules.values():
        names = [(name, value) for name, value in getattr(module, "__dict__", {}).items() if id(value) in wanted]
        bindings += [(module, name, function) for name, function in names]
    return bindings


def _call_whole(function: Callable[..., Any], called: list[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    return record_call(function, partial(function, *args, **kwargs), args, kwargs, called)


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


def refuse_checkpoint(*_: Any, **__: Any) -> Any:
    """Refuse activation checkpointing; replaces its function."""
    raise CaptureError(
        "the model uses activation checkpointing (torch.utils.checkpoint), whose recomputation a captured graph cannot "
        "hold. Turn it off for the conversion (transformers: model.gradient_checkpointing_disable()), or convert in "
        "place, with autocastfx.enable, which keeps it."
    )


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
