"""Restore the caller's module after a capture."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import nn

__all__ = ["intact", "random_numbers_kept", "same_content"]

_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType)


@contextmanager
def intact(model: nn.Module, training: Sequence[bool], held: Mapping[str, torch.Tensor]) -> Generator[None, None, None]:
    """While open, ``model`` has the given modes and tensors; afterwards it is as before.

    Attributes that ``forward`` sets, and may leave fake tensors in, are restored, containers and objects by content. So
    are the states of the random number generators of torch, Python and numpy.

    Args:
        model: the caller's model.
        training: the flag of each module, in the order of ``model.modules()``.
        held: parameters and buffers by name that replace the model's own.
    """
    modules = list(model.modules())
    saved = _saved_contents(model)
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for prefix, module in model.named_modules():
            for table in (cast("dict[str, Any]", module._parameters), cast("dict[str, Any]", module._buffers)):
                for name in table:
                    table[name] = held.get(f"{prefix}.{name}" if prefix else name, table[name])
        with random_numbers_kept():
            yield
    finally:
        for owner, content in saved:
            _restore(owner, content)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def random_numbers_kept() -> AbstractContextManager[None]:
    """While open, torch's random numbers are free to be drawn; afterwards their states are as before.

    Those of CUDA devices only once something has used one: a process that has cannot fork, as data loaders do.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(devices=devices)


def _saved_contents(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the objects that a forward can change in place, each with a copy of its content.

    These are containers at any depth, the attributes of modules and of the objects that modules hold, and tensors that
    are neither parameters nor buffers. Objects inside those objects are left out: a trainer, say, refers to everything.
    """
    registered = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: dict[int, tuple[Any, Any]] = {}
    queue: deque[tuple[Any, bool]] = deque([(model, True)])
    while queue:
        item, of_module = queue.popleft()
        if id(item) in found or id(item) in registered or isinstance(item, _NO_STATE):
            continue
        members: Any = ()
        if isinstance(item, torch.Tensor):
            if type(item) in (torch.Tensor, nn.Parameter) and not item.is_inference():
                found[id(item)] = (item, (item._version, item.detach().clone()))
        elif isinstance(item, (list, dict, set, deque)):
            kind: Any = next(kind for kind in (list, dict, set, deque) if isinstance(item, kind))
            found[id(item)] = (item, kind.copy(item))  # a subclass's own copy may do more
            members = item.values() if isinstance(item, dict) else item
        elif isinstance(item, tuple):
            members = item
        elif of_module and isinstance(getattr(item, "__dict__", None), dict):
            members, of_module = (item.__dict__,), isinstance(item, nn.Module)
        queue.extend((member, of_module) for member in members)
    return list(found.values())


def _restore(owner: Any, content: Any) -> None:
    if isinstance(owner, torch.Tensor):
        version, values = content
        if owner._version != version:
            owner.detach().copy_(values)
    elif isinstance(owner, set):
        if owner != content:
            owner.clear()
            owner.update(content)
    elif not same_content(owner, content):
        owner.clear()
        owner.update(content) if isinstance(owner, dict) else owner.extend(content)


def same_content(owner: Any, content: Any) -> bool:
    """True if two containers of one kind hold the same objects in the same order."""
    flat, was = ([*c, *c.values()] if isinstance(c, dict) else list(c) for c in (owner, content))
    return len(flat) == len(was) and all(a is b for a, b in zip(flat, was, strict=True))
