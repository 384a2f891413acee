"""Hooks that a forward registers on tensors: a graph registers them in each call, or capture refuses them by name."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn, cast

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autocastfx.capture.failure import place
from autocastfx.capture.python_state import is_plain
from autocastfx.capture.rewrites import Rule
from autocastfx.capture.whole_calls import record_call
from autocastfx.errors import CaptureError, UnsupportedError
from autocastfx.graph.names import op_name

__all__ = ["HookCall", "tensor_hook_rules", "used_before"]

_GRAD_FN = cast("Any", torch.Tensor.grad_fn).__get__
_NO_READERS = ("detach", "sym_size", "output")  # no gradient comes through them
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_HELP = "autocastfx.enable converts in place, and keeps hooks."


class HookCall:
    """``tensor.register_hook(hook)`` as a function that gives the tensor back."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.__module__ = "autocastfx"
        self.__name__ = self.__qualname__ = "register_hook"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register the hook, if there will be a gradient."""
        if tensor.requires_grad:
            tensor.register_hook(self.hook)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(getattr(self.hook, "__self__", None), nn.Module):
            raise UnsupportedError(
                f"{self.hook.__qualname__}, a hook that forward registers, belongs to the original, which is not saved "
                "with a converted model: let it be a function of a module of Python."
            )
        return HookCall, (self.hook,)


def tensor_hook_rules(model: nn.Module, called: list[Callable[..., Any]]) -> Mapping[Any, Rule]:
    """Return rules that record ``h.register_hook(hook)`` as a node, and refuse what a graph cannot repeat.

    Args:
        model: the model that is captured.
        called: where functions that become nodes are added.
    """
    return {
        torch.Tensor.register_hook: partial(_register, model, called),
        torch.Tensor.register_post_accumulate_grad_hook: partial(_refuse, "register_post_accumulate_grad_hook"),
        torch.Tensor.retain_grad: partial(_refuse, "retain_grad"),
        _GRAD_FN: _grad_fn,
    }


def used_before(hooked: fx.Node, at: fx.Node | None = None) -> bool:
    """True if a node, before ``at``, reads ``hooked``: its gradient would not pass the hook."""
    readers = (user for user in hooked.users if op_name(user).partition(".")[0] not in _NO_READERS)
    return any(at is None or user < at for user in readers)


def _register(
    model: nn.Module, called: list[Callable[..., Any]], tensor: torch.Tensor, hook: Callable[..., Any]
) -> Any:
    mode = get_proxy_mode()
    if any(tensor is held for held in (*model.parameters(), *model.buffers())):
        _raise("register_hook", "on a parameter: each call would add another. Register it once, outside of forward")
    if (name := _not_repeated(hook)) is not None:
        _raise("register_hook", f"whose function holds {name}, which a graph would keep from this call for ever")
    if mode is not None:
        proxy: Any = mode.tracer.unwrap_proxy(tensor)
        node = getattr(proxy, "node", None) or getattr(getattr(proxy, "proxy", None), "node", None)
        if isinstance(node, fx.Node) and used_before(node):
            _raise("register_hook", "after the tensor was used. Register it on the line that follows its making")
        record_call(HookCall(hook), lambda: tensor, (tensor,), {}, called, trace=False)
    return _Handle()


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    _raise(name, "which a graph does not hold")


def _raise(name: str, why: str) -> NoReturn:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    at = f", at {place(frame.f_code.co_filename, frame.f_lineno)}" if frame is not None else ""
    raise CaptureError(f"forward calls {name}, {why}{at}. {_HELP}")


class _Handle:
    """The handle of a recorded hook, which stays."""

    def remove(self) -> NoReturn:
        """Refuse to remove the hook in forward."""
        raise CaptureError(f"forward removes a hook that it has registered, which a graph does not hold. {_HELP}")


def _grad_fn(tensor: torch.Tensor) -> Any:
    found = tensor.grad_fn
    return None if found is None else _GradFn(found)


class _GradFn:
    """A node of autograd as forward sees it, which takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            _raise(f"{name} of a grad_fn", "which a graph does not hold")
        return getattr(self._node, name)


def _not_repeated(hook: Any, seen: tuple[Any, ...] = ()) -> str | None:
    """Name what ``hook`` holds besides plain values, modules and functions: it may be made anew in each forward."""
    if any(hook is one for one in seen) or isinstance(hook, (nn.Module, type, types.ModuleType, CodeType)):
        return None
    seen = (*seen, hook)
    if isinstance(hook, functools.partial):
        held = {**{f"argument {i}": one for i, one in enumerate(hook.args)}, **hook.keywords, "func": hook.func}
    elif isinstance(hook, types.MethodType):
        held = {"self": hook.__self__, "func": hook.__func__}
    elif isinstance(hook, types.FunctionType):
        held = {**inspect.getclosurevars(hook).nonlocals, **(hook.__kwdefaults__ or {})}
        held.update({f"default {i}": one for i, one in enumerate(hook.__defaults__ or ())})
    else:
        is_bare = isinstance(hook, types.BuiltinFunctionType) and hook.__self__ is None
        return None if is_bare else str(type(hook).__name__)
    for name, one in held.items():
        if not is_plain(one) and (inner := _not_repeated(one, seen)) is not None:
            return repr(name) if not callable(one) else inner
    return None
