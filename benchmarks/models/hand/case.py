"""Make a hand-written case from a forward function, the parts of its module, and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.zoo import Inputs, ZooModel, generator

WIDTH = 16  # features of every row


def case(
    forward: Callable[..., Any],
    parts: Callable[[], Mapping[str, Any]] | None = None,
    inputs: Inputs | None = None,
    refused: str = "",
) -> ZooModel:
    """Make a case named after ``forward``, whose first argument is the module.

    Args:
        forward: the forward of the module.
        parts: makes the module's parts by name: modules, parameters, and buffers as plain tensors.
        inputs: keyword inputs for a batch and a size; rows of features if not given.
        refused: a regular expression for the error, if the model must be refused.
    """
    kind = type(forward.__name__, (nn.Module,), {"forward": forward, "__module__": forward.__module__})

    def build() -> nn.Module:
        torch.manual_seed(0)
        module = kind()
        for name, part in (parts or linears("a", "b"))().items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            module.register_buffer(name, part) if is_buffer else setattr(module, name, part)
        return module

    return ZooModel(forward.__name__.replace("_", "-"), build, inputs or rows, refused)


def linears(*names: str, **others: Callable[[], Any]) -> Callable[[], Mapping[str, Any]]:
    """Return linear layers between rows of the same size, and further parts."""
    return lambda: {name: nn.Linear(WIDTH, WIDTH) for name in names} | {name: make() for name, make in others.items()}


def rows(batch: int, size: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, size, WIDTH, generator=generator(batch, size))}


def masked(batch: int, size: int) -> dict[str, Any]:
    """Return rows and a mask of the present ones: fewer in each row of the batch."""
    lengths = torch.tensor([max(size - 3 * row, 1) for row in range(batch)])
    return {**rows(batch, size), "there": torch.arange(size) < lengths[:, None]}


def images(batch: int, size: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 4, size, size, generator=generator(batch, size))}


def tokens(batch: int, size: int) -> dict[str, Any]:
    return {"ids": torch.randint(0, 32, (batch, size), generator=generator(batch, size))}
