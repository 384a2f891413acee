"""Inputs and layers that many cases share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["images", "mean_square", "mlp", "rows", "sequences", "tokens"]


def rows(width: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, width)


def sequences(width: int, batch: int = 2) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(batch, size, width)


def tokens(vocabulary: int, batch: int = 2) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(vocabulary, (batch, size))


def images(channels: int, side: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, channels, side, side)


def mean_square(outputs: Any, args: tuple[Any, ...]) -> Tensor:
    """A loss in which the gradients of rows add up, not cancel."""
    return outputs.float().pow(2).sum(-1).mean()


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a tanh between each two."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Tanh()] * (i > 0) + [nn.Linear(before, after)]
    return nn.Sequential(*layers)
