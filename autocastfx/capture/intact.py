"""Leave the caller's module as it was, whatever a capture does to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["intact"]


@contextmanager
def intact(model: nn.Module, training: Sequence[bool], held: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While open, ``model`` has the given modes and tensors; afterwards it is what it was.

    Attributes that ``forward`` sets (and leaves fake tensors in) are restored, lists and dicts among them by content, and so
    is the state of the random number generators.

    Args:
        model: the caller's.
        training: the flag of each module, in the order of ``model.modules()``.
        held: parameters and buffers by name that stand in for the model's own.
    """
    modules = list(model.modules())
    saved = [(module, dict(module.__dict__), _contents(module.__dict__)) for module in modules]
    try:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for prefix, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for name in table:
                    table[name] = held.get(f"{prefix}.{name}" if prefix else name, table[name])
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        for module, attributes, contents in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _contents(attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in attributes.values() if isinstance(value, (list, dict, set))]
