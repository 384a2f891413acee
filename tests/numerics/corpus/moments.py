"""Small differences of large values: variances and covariances, of windows and of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import Compared, pictures, rows

__all__ = ["CASES"]

POINT = "small differences"


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


def by_pool(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """Monodepth2: windows of 3 x 3 by pooling, reflected at the border."""
    p, y = F.pad(p, (1, 1, 1, 1), "reflect"), F.pad(y, (1, 1, 1, 1), "reflect")
    a, b = F.avg_pool2d(p, 3, 1), F.avg_pool2d(y, 3, 1)
    va, vb = F.avg_pool2d(p**2, 3, 1) - a**2, F.avg_pool2d(y**2, 3, 1) - b**2
    ab = F.avg_pool2d(p * y, 3, 1) - a * b
    alike = (2 * a * b + 1e-4) * (2 * ab + 9e-4) / ((a**2 + b**2 + 1e-4) * (va + vb + 9e-4))
    return torch.clamp((1 - alike) / 2, 0, 1).mean()


def in_channels(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    window = model.window.expand(3, 1, 7, 7)
    return likeness(lambda t: F.conv2d(t, window, groups=3), p.expand(-1, 3, -1, -1), y.expand(-1, 3, -1, -1))


def stacked(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """torchmetrics: all five windows by one convolution of a stack."""
    both = F.conv2d(torch.cat([p, y, p * p, y * y, p * y]), model.window)
    a, b, aa, bb, ab = both.split(p.shape[0])
    low, high = 2 * (ab - a * b) + 9e-4, (aa - a.square()) + (bb - b.square()) + 9e-4
    return 1 - ((2 * a * b + 1e-4) * low / ((a.square() + b.square() + 1e-4) * high)).mean()


def by_scales(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """MS-SSIM: a product of powers over resolutions."""
    found = []
    for _ in range(2):
        a, b, aa, bb, ab = (F.conv2d(t, model.window) for t in (p, y, p * p, y * y, p * y))
        found.append(((2 * (ab - a * b) + 9e-4) / (aa - a * a + bb - b * b + 9e-4)).mean((1, 2, 3)).relu())
        p, y = F.avg_pool2d(p, 2), F.avg_pool2d(y, 2)
    return 1 - torch.prod(torch.stack(found) ** torch.tensor([0.4, 0.6])[:, None], 0).mean()


def correlated(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """VoxelMorph's local correlation."""
    ones, n = torch.ones(1, 1, 5, 5), 25
    ps, ys, pp, yy, py = (F.conv2d(t, ones, padding=2) for t in (p, y, p * p, y * y, p * y))
    a, b = ps / n, ys / n
    cross = py - b * ps - a * ys + a * b * n
    return -(cross * cross / ((pp - 2 * a * ps + a * a * n) * (yy - 2 * b * ys + b * b * n) + 1e-3)).mean()


def correlated_whole(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    p, y = p.flatten(1), y.flatten(1)
    covariance = (p * y).mean(1) - p.mean(1) * y.mean(1)
    return -(covariance / ((p.square().mean(1) - p.mean(1).square()) * y.var(1)).sqrt()).mean()


def guided(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    m, q = F.avg_pool2d(p, 5, 1), F.avg_pool2d(y, 5, 1)
    slope = (F.avg_pool2d(p * y, 5, 1) - m * q) / (F.avg_pool2d(p * p, 5, 1) - m * m + 1e-3)
    return (F.avg_pool2d(slope, 3, 1) * p[..., 3:-3, 3:-3]).square().mean()


def depth_error(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """The scale-invariant error of depths, whose logarithms are off by about one factor."""
    d = torch.log(p.clamp(min=0.05)) - torch.log(0.5 * y.clamp(min=0.05))
    return torch.sqrt((d**2).mean() - 0.97 * (d.mean() ** 2))


class Spread(nn.Module):
    """Rows scaled by their deviation, as E[x²] - E[x]², of values far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def scale(self, h: Tensor) -> Tensor:
        mean = h.mean(-1, keepdim=True)
        return (h - mean) * torch.rsqrt((h * h).mean(-1, keepdim=True) - mean * mean + 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.scale(self.layer(x) + 4))


class Covariance(nn.Module):
    """Deep CORAL: the covariances of two batches of features, by sums of products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def covariance(self, h: Tensor) -> Tensor:
        total = h.sum(0, keepdim=True)
        return (h.T @ h - total.T @ total / h.shape[0]) / (h.shape[0] - 1)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.covariance(a) - self.covariance(b)).square().sum() / (4 * 8 * 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.distance(self.layer(a) + 2, self.layer(b) + 2)


class Ensemble(nn.Module):
    """A deep ensemble: the variance of a mixture of Gaussians, as mean(v + m²) - mean(m)²."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 2) for _ in range(5))

    def mixture(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        middle = mean.mean(0)
        return middle, (variance + mean**2).mean(0) - middle**2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = torch.stack([head(x) for head in self.heads]).chunk(2, -1)
        return self.mixture(mean + 6, 0.01 + 0.1 * torch.sigmoid(variance))


MEASURES: dict[str, tuple[Callable[[Compared, Tensor, Tensor], Tensor], float]] = {
    "ssim": (by_window, 4),
    "ssim-made-window": (by_made_window, 4),
    "ssim-separable": (by_edges, 4),
    "ssim-pool": (by_pool, 4),
    "ssim-channels": (in_channels, 4),
    "ssim-stacked": (stacked, 4),
    "ms-ssim": (by_scales, 4),
    "local-correlation": (correlated, 8),
    "correlation": (correlated_whole, 8),
    "guided-filter": (guided, 8),
    "depth-error": (depth_error, 8),
}
WHY = {
    4: "the layer's picture 3; neighbours' differences are a quarter of it",
    8: "the layer's picture 3; deviations, and nothing beside them, are an eighth of it",
}

CASES = [
    *(
        Case(name, lambda m=m: Compared(m), pictures, POINT, Demand(3, n), WHY[n], ("compare",), sizes=(2, 3))
        for name, (m, n) in MEASURES.items()
    ),
    Case("spread", Spread, rows(16), POINT, Demand(5, 4), "two layers; a mean several times the deviation", ("scale",)),
    Case("coral", Covariance, lambda n: (torch.randn(n, 16), 2 * torch.randn(n, 16)), POINT, Demand(3, 4),
         "the layer 3; a mean four times the deviation", ("distance",), sizes=(32, 48)),
    Case("ensemble", Ensemble, rows(16), POINT, Demand(4), "heads 3, offset 1", ("mixture",),
         {"output 1": Demand(4, 20.0)}),
]  # fmt: skip
