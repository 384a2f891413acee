"""Patch torch while a model is traced, so that its Python functions are traced into and some calls stay whole."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional
import torch.utils.checkpoint
from torch import fx
from torch.fx.proxy import TraceError
from torch.utils import _device as torch_device
from torch.utils import _pytree as pytree

from autocastfx.capture.draft.traced_value import is_tensor
from autocastfx.capture.draft.tracer import TORCH, Tracer
from autocastfx.capture.patch import patched_here
from autocastfx.capture.whole_calls import CHECKPOINT, AutogradCall, places, refuse_checkpoint

__all__ = ["run_through"]

# Functions of these modules dispatch to arguments that are not tensors, unless these tests return False.
_WITH_TESTS = (torch.nn.functional, torch.functional, sys.modules["torch._tensor"])
_TESTS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_FROM_DATA = ("tensor", "as_tensor", "asarray")


@contextmanager
def run_through(tracer: Tracer, leaves: Sequence[str]) -> Generator[None, None, None]:
    """While open, ``tracer`` sees the operators inside of torch's Python functions, and each creation of a tensor.

    Calls of other threads are unchanged.

    Args:
        tracer: the tracer of the model.
        leaves: dotted paths of Python functions that stay whole, as custom autograd functions do.
    """
    with ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(patched_here(owner, name, new))

        for module in _WITH_TESTS:
            for name in (n for n in _TESTS if hasattr(module, n)):
                patch(module, name, _no)
        for name in (n for n in vars(torch.nn.functional) if n.startswith("_verify_")):  # they compare sizes
            patch(torch.nn.functional, name, _no)
        makers = {id(function) for function in torch_device._device_constructors()}
        for name, function in list(vars(torch).items()):
            if id(function) in makers:
                patch(torch, name, _recorded(tracer, function))
        patch(torch, "is_tensor", is_tensor)
        patch(torch.autograd.Function, "apply", classmethod(functools.partial(_applied, tracer)))
        patch(torch.utils.checkpoint, CHECKPOINT, refuse_checkpoint)
        patch(torch.amp.autocast_mode.autocast, "__enter__", _refuse_autocast)
        for owner, attribute, function in places(leaves):
            whole = functools.partial(_whole, tracer, function)
            patch(owner, attribute, staticmethod(whole) if isinstance(owner, type) else whole)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.enable_grad())
        yield


def _recorded(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes tensors, so that the graph makes them in each call instead of baking one in."""
    packet: Any = getattr(torch.ops.aten, function.__name__, None)

    def make(*args: Any, **kwargs: Any) -> Any:
        by_torch = sys._getframe(1).f_code.co_filename.startswith(TORCH) and not _has_values(args, kwargs)
        if by_torch:
            return function(*args, **kwargs)
        if packet is None or function.__name__ in _FROM_DATA:
            return tracer.call("lift_fresh_copy", (tracer.held(function(*args, **kwargs)),), {})
        return tracer.packet(packet, args, {k: v for k, v in kwargs.items() if k != "requires_grad"})

    return make


def _applied(tracer: Tracer, kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if kind.__module__.split(".")[0] == "torch":
        raise TraceError(f"{kind.__name__} is not traced")
    return tracer.emit(AutogradCall(kind), args, kwargs)


def _whole(tracer: Tracer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return tracer.emit(function, args, kwargs) if _has_values(args, kwargs) else function(*args, **kwargs)


def _no(*_: Any, **__: Any) -> bool:
    return False


def _has_values(*given: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(given))


def _refuse_autocast(*_: Any) -> Any:
    raise TraceError("a region under torch.autocast is not traced")
