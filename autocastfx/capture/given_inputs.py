"""Read the inputs of one call as a user gives them, and the device that they and the model are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature

__all__ = ["arguments_of", "batch_of", "batches_of", "device_of", "inputs_of", "named_device"]

_FROM_NUMPY = "Make a tensor of it: torch.from_numpy(array)."
_IN_A_TUPLE = "An object that is the model's first argument goes into a tuple: (inputs,)."


def inputs_of(positional: Any, keywords: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and the keyword inputs of a call.

    Args:
        positional: a tensor, a tuple or list of positional inputs, a mapping of keyword inputs, or None.
        keywords: keyword inputs, or None.

    Raises:
        TypeError: the inputs are none of these; or both hold keyword inputs.
    """
    if isinstance(positional, Mapping):
        if keywords:
            raise TypeError(
                "example_inputs is a dict, which holds keyword inputs, and example_kwargs has others: give one of the "
                "two. A dict that is the model's first argument goes into a tuple: (inputs,)."
            )
        return (), cast("Mapping[str, Any]", positional)
    if isinstance(positional, torch.Tensor):
        return (positional,), keywords or {}
    if positional is not None and not isinstance(positional, (tuple, list)):
        raise TypeError(
            "example_inputs is a tensor, a tuple of the positional inputs of one call, or a dict of its keyword "
            f"inputs, not {type(positional).__name__}. {_FROM_NUMPY if _is_array(positional) else _IN_A_TUPLE}"
        )
    return tuple(cast("Sequence[Any]", positional or ())), keywords or {}


def batch_of(
    signature: CallSignature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and keyword inputs of a call; a dict that stands alone holds keyword inputs.

    It does so if the model takes all its keys by name. Else it is the first argument.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        given = cast("Mapping[str, Any]", args[0])
        if given and signature.takes(given):
            return (), given
    return tuple(args), kwargs


def batches_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of the batches that a user gave.

    Raises:
        TypeError: one batch was given, or nothing that can be iterated.
    """
    if isinstance(batches, (torch.Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches is an iterable of batches, not a {type(batches).__name__}; write [batch] for one")
    return iter(batches)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword inputs of the call that a batch is for.

    Args:
        batch: a tensor; a tuple or list of positional inputs; a mapping of keyword inputs; or a pair of a tuple and a
            mapping, for both.
    """
    if isinstance(batch, Mapping):
        return (), dict(cast("Mapping[str, Any]", batch))
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    parts: tuple[Any, ...] = tuple(cast("Iterable[Any]", batch))
    if len(parts) == 2 and isinstance(parts[0], (tuple, list)) and isinstance(parts[1], Mapping):
        return tuple(cast("Iterable[Any]", parts[0])), dict(cast("Mapping[str, Any]", parts[1]))
    return parts, {}


def _is_array(held: object) -> bool:
    return type(held).__module__ == "numpy"


def device_of(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> torch.device:
    """Return the device of the model's first parameter or buffer, else of the first tensor among the inputs."""
    held = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((tuple(args), dict(kwargs or {})))]
    return next((one.device for one in held if isinstance(one, torch.Tensor)), torch.device("cpu"))


def named_device(given: torch.device | str | None) -> torch.device | None:
    """Return the device that a user named; None for None.

    Raises:
        ValueError: torch knows none of this name.
    """
    try:
        return torch.device(given) if given is not None else None
    except RuntimeError as error:
        near = "cuda" if str(given).lower().startswith("gpu") else "cpu"
        known = str(error).partition("\n")[0]
        raise ValueError(
            f"device={given!r} is not a device that torch knows (did you mean {near!r}?): {known}"
        ) from None
