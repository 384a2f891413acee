"""Inputs and layers that many cases share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Compared", "images", "mean_square", "mlp", "pictures", "rows", "sequences", "tokens"]

SIDE = 16


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


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Two pictures that are alike, of values around 0.6."""
    smooth = F.avg_pool2d(torch.randn(size, 1, SIDE + 4, SIDE + 4), 5, 1)
    return 0.6 + 0.3 * smooth + 0.05 * torch.randn(size, 1, SIDE, SIDE), 0.6 + 0.3 * smooth


class Compared(nn.Module):
    """A layer's picture beside a target.

    Args:
        measure: the loss, from both.
    """

    def __init__(self, measure: Callable[[Compared, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.measure = nn.Conv2d(1, 1, 3, padding=1, bias=False), measure
        nn.init.dirac_(self.net.weight)
        edge = torch.exp(-(torch.arange(-3, 4).float() ** 2) / 4.5)
        edge = edge / edge.sum()
        self.register_buffer("window", (edge[:, None] * edge)[None, None])
        self.register_buffer("laplacian", torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])[None, None])
        self.register_buffer("sobel", torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])[None, None])
        self.register_buffer("steps", (torch.diag(torch.ones(SIDE - 1), 1) - torch.eye(SIDE))[:-1])

    def compare(self, p: Tensor, y: Tensor) -> Tensor:
        return self.measure(self, p, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compare(self.net(x), y)
