"""Methods of a converted model: while they run, calls of the model and of its parts are converted."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from autocastfx.errors import UnsupportedError
from autocastfx.runtime.around import skip_frames


class Method:
    """A method of the model of ``owner``, an AmpModule: while it runs, calls of the model and its parts are converted.

    Those of other threads are not.
    """

    def __init__(self, owner: Any, method: MethodType) -> None:
        update_wrapper(self, method)
        self._owner, self._method = owner, method
        self.__func__, self.__self__ = method.__func__, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method with the model as its object, so that it may call ``super()``.

        Raises:
            UnsupportedError: it is a generator, which would run when this call has ended.
        """
        owner, function = self._owner, self.__func__
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise UnsupportedError(
                f"{owner._original.class_name}.{function.__name__} is a generator, and what it runs later would run in "
                "float32. Convert in place, with autocastfx.enable."
            )
        with _converted_inside(owner):
            return owner._wrapped(self._method(*map(owner._bare, args), **kwargs))


def members_for(kind: type[nn.Module]) -> dict[str, Any]:
    """Return what the class of views of ``kind`` has besides: what Python looks for in a class, and names of ours."""
    members: dict[str, Any] = {name: _the_models(name) for name in ("freeze", "refresh_weights") if hasattr(kind, name)}
    special = [name for name in dir(kind) if name.startswith("__") and not hasattr(fx.GraphModule, name)]
    if not issubclass(kind, fx.GraphModule) and kind.__call__ is not nn.Module.__call__:
        special.append("__call__")
    return members | {name: _special(name) for name in special if callable(getattr(kind, name))}


def _the_models(name: str) -> property:
    """Return what gives the model's own method of a name that is ours, too, which ``AmpModule`` has all the same."""
    return property(lambda self: self.__getattr__(name))


def _special(name: str) -> Callable[..., Any]:
    """Return a special method that is the model's."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self._model, name)
        return map(self._wrapped, own()) if name in _ITERATES else Method(self, own)(*args, **kwargs)

    skip_frames(method)
    return method


_ITERATES = ("__iter__", "__reversed__")


@contextmanager
def _converted_inside(owner: Any) -> Generator[None]:
    """While open, calls of the model and of its modules in this thread are calls of their views."""
    thread = threading.get_ident()
    taken = [m for m in owner._model.modules() if m.__dict__.get("_compiled_call_impl") is None]
    for module in taken:
        module.__dict__["_compiled_call_impl"] = _InsideCall(owner, module, thread)
    try:
        yield
    finally:
        for module in taken:
            module.__dict__.pop("_compiled_call_impl", None)


class _InsideCall:
    """The call of a module while a method of a converted model runs."""

    def __init__(self, owner: Any, module: Any, thread: int) -> None:
        self.owner, self.module, self.thread = owner, module, thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's view, but inside of a graph and in other threads the module."""
        if torch.compiler.is_compiling() or threading.get_ident() != self.thread:
            return self.module._call_impl(*args, **kwargs)
        return self.owner._view_of(self.module)._call_impl(*args, **kwargs)  # a __call__ of its own has led here
