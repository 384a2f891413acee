"""Patch functions during a capture, for the capturing thread alone."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

from torch.fx import _symbolic_trace

__all__ = ["CAPTURING", "is_captured_here", "patched_here", "tracing_here"]

# Held during a capture. Re-entrant, because the model's own forward may call a converted model.
CAPTURING = threading.RLock()


def is_captured_here() -> bool:
    """True while this thread captures a model, or checks what it has captured."""
    return bool(cast("Any", CAPTURING)._is_owned())


@contextmanager
def patched_here(owner: Any, name: str, new: Any) -> Generator[None, None, None]:
    """While open, ``owner.name`` is ``new`` for the thread that opened it, and unchanged for others.

    Args:
        owner: a module or a class.
        name: the attribute's name.
        new: a function; in a class also a ``classmethod`` or ``staticmethod``.
    """
    old = inspect.getattr_static(owner, name)
    both = _InClass(old, new) if isinstance(owner, type) else _of_module(old, new)
    with mock.patch.object(owner, name, both):
        yield


@contextmanager
def tracing_here() -> Generator[None, None, None]:
    """While open, a trace of torch.fx records what the thread that opened it calls, and nothing that others call.

    torch.fx patches ``nn.Module.__call__`` for the whole process: a module called by another thread meanwhile would be
    taken for one of the traced model's, or refused.
    """
    patcher: Any = cast("Any", _symbolic_trace)._Patcher
    patch_method = patcher.patch_method

    def patch_here(self: Any, cls: type, name: str, new: Any, deduplicate: bool = True) -> None:
        patch_method(self, cls, name, _of_module(getattr(cls, name), new), deduplicate)

    with patched_here(patcher, "patch_method", patch_here):
        yield


class _InClass:
    """A member of a class: ``new`` for the thread that created it, ``old`` for others."""

    def __init__(self, old: Any, new: Any) -> None:
        self.old, self.new, self.thread = old, new, threading.get_ident()

    def __get__(self, instance: Any, owner: type) -> Any:
        return (self.new if threading.get_ident() == self.thread else self.old).__get__(instance, owner)


def _of_module(old: Any, new: Any) -> types.FunctionType:
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == thread else old)(*args, **kwargs)

    return either
