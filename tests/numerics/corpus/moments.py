"""Small differences of large values: variances and covariances of windows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand

__all__ = ["CASES"]

SIDE, POINT = 16, "small differences"


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

    def compare(self, p: Tensor, y: Tensor) -> Tensor:
        return self.measure(self, p, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compare(self.net(x), y)


def likeness(average: Callable[[Tensor], Tensor], p: Tensor, y: Tensor) -> Tensor:
    a, b = average(p), average(y)
    va, vb, ab = average(p * p) - a.pow(2), average(y * y) - b.pow(2), average(p * y) - a * b
    return 1 - ((2 * a * b + 1e-4) * (2 * ab + 9e-4) / ((a * a + b * b + 1e-4) * (va + vb + 9e-4))).mean()


def by_window(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    return likeness(lambda t: F.conv2d(t, model.window), p, y)


def by_made_window(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    window = torch.ones(1, 1, 5, 5) / 25
    return likeness(lambda t: F.conv2d(t, window), p, y)


def by_edges(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    edge = model.window.sum(2, keepdim=True)
    return likeness(lambda t: F.conv2d(F.conv2d(t, edge), edge.mT), p, y)


MEASURES: dict[str, Callable[[Compared, Tensor, Tensor], Tensor]] = {
    "ssim": by_window,
    "ssim-made-window": by_made_window,
    "ssim-separable": by_edges,
}
WHY = "the layer's picture 3; neighbours' differences are a quarter of it"

CASES = [
    Case(name, lambda m=m: Compared(m), pictures, POINT, Demand(3, 4), WHY, ("compare",), sizes=(2, 3))
    for name, m in MEASURES.items()
]
