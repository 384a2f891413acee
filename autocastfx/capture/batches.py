"""Read batches as a user gives them: an iterable, each member of which holds the inputs of one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

__all__ = ["arguments_of", "iterated"]


def iterated(batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over batches.

    Raises:
        TypeError: it is one tensor or mapping, which would be taken apart, or cannot be iterated.
    """
    if isinstance(batches, (torch.Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches is an iterable of batches, not a {type(batches).__name__}; write [batch] for one")
    return iter(batches)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that a batch stands for.

    A batch is a tensor; a tuple or list of positional arguments; a mapping of keyword arguments; or a pair of a tuple
    and a mapping, for both.
    """
    if isinstance(batch, Mapping):
        return (), dict(cast("Mapping[str, Any]", batch))
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    parts: tuple[Any, ...] = tuple(cast("Iterable[Any]", batch))
    if len(parts) == 2 and isinstance(parts[0], (tuple, list)) and isinstance(parts[1], Mapping):
        return tuple(cast("Iterable[Any]", parts[0])), dict(cast("Mapping[str, Any]", parts[1]))
    return parts, {}
