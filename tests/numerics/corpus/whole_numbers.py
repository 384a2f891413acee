"""Counts, codes and places: whole numbers held as floats, beyond what 16 bits tell apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import rows

__all__ = ["CASES"]

WIDTH = 16
LONG = (300, 2600)


class TriangleCount(nn.Module):
    """A running count of a mask as a product with a lower triangle, then embedded places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(3000, WIDTH), nn.Linear(WIDTH, 4)

    def count(self, mask: Tensor) -> Tensor:
        ones = torch.ones(mask.shape[1], mask.shape[1], device=mask.device)
        return torch.tril(ones) @ mask.float()[..., None]

    def forward(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        count = self.count(mask).squeeze(-1)
        return self.out(self.table(count.long())), count


class Degrees(nn.Module):
    """Degrees of a graph as a product with ones, and a normalised propagation."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def degree(self, adjacent: Tensor) -> Tensor:
        return adjacent @ torch.ones(adjacent.shape[0], 1, device=adjacent.device)

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        adjacent = edges.float()
        degree = self.degree(adjacent)
        return (adjacent @ self.map(x)) / degree.clamp_min(1), degree


class SoftArgmax(nn.Module):
    """A tracker: the expected place among thousands, near the last one, as a product with all places."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def place(self, weights: Tensor) -> Tensor:
        return weights @ torch.arange(weights.shape[-1], device=weights.device, dtype=torch.float32)

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        away = torch.arange(x.shape[1], device=x.device) - last[:, None]
        return self.place((self.score(x).squeeze(-1) - away**2 / 8).softmax(-1))


class SoftArgmaxSum(SoftArgmax):
    """The same as a sum of products."""

    def place(self, weights: Tensor) -> Tensor:
        return (weights * torch.arange(weights.shape[-1], device=weights.device)).sum(-1)


class OneHotLookup(nn.Module):
    """A lookup of whole numbers by a one-hot product, as written for accelerators."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("years", torch.randint(1000, 4000, (40,)).float())
        self.embed = nn.Embedding(40, WIDTH)
        self.out = nn.Linear(WIDTH, 4)

    def year(self, hot: Tensor) -> Tensor:
        return hot @ self.years

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hot = F.one_hot(ids, 40).float()
        return self.out(hot @ self.embed.weight), self.year(hot)


class Segments(nn.Module):
    """Packed documents: segment numbers by a running sum of boundaries, and attention inside each."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        segment = starts.float().cumsum(-1)
        same = segment[:, :, None] == segment[:, None, :]
        query = self.query(x)
        scores = (query @ query.transpose(-1, -2) / 4).masked_fill(~same, float("-inf"))
        return scores.softmax(-1) @ self.value(x)


class MaskedMean(nn.Module):
    """A mean over true tokens: a sum divided by a count."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = mask.unsqueeze(-1).float()
        return (self.encode(x) * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


class BinaryCodes(nn.Module):
    """Lookup-free quantisation: signs to a code, by a product with powers of two."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("powers", 2.0 ** torch.arange(12))
        self.table, self.out = nn.Embedding(4096, WIDTH), nn.Linear(WIDTH, 4)

    def code(self, bits: Tensor) -> Tensor:
        return (bits @ self.powers).long()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.code((x > 0).float())
        return self.out(self.table(code)), code


class Ranks(nn.Module):
    """Ranks by pairwise comparison, and a correlation of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(1, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rank = (x[:, None] > x[None]).to(x.dtype).sum(-1)
        return self.out(torch.tanh(self.weigh((rank / x.shape[0])[:, None]))), rank


class BoxAreas(nn.Module):
    """Overlap of boxes in whole pixels: areas reach 10^6."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        boxes = boxes.float()
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        corner = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
        side = (torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - corner).clamp(min=0)
        shared = side[..., 0] * side[..., 1]
        overlap = shared / (area[:, None] + area[None] - shared)
        return overlap @ self.out(x), overlap


class Confusion(nn.Module):
    """Counts of pairs of classes as a product of one-hot vectors, and an agreement from them."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def counts(self, a: Tensor, b: Tensor) -> Tensor:
        return F.one_hot(a, 3).float().T @ F.one_hot(b, 3).float()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        counts = self.counts(a, b)
        return (counts.diagonal().sum() / counts.sum()) * self.temperature, counts


class VoxelNumbers(nn.Module):
    """Coordinates to the number of a voxel, computed in floats."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        cell = torch.floor(points / 0.2)
        number = (cell[:, 0] * 40 * 40 + cell[:, 1] * 40 + cell[:, 2]).long()
        same = (number[:, None] == number[None]).float()
        return self.out(same @ self.map(features)), number


class Gaps(nn.Module):
    """Seconds between events, from stamps of whole seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.rate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.01))

    def forward(self, x: Tensor, stamps: Tensor) -> Tensor:
        stamps = stamps.float()
        gap = (stamps[:, :, None] - stamps[:, None, :]).abs()
        return torch.exp(-self.rate * gap) @ self.encode(x)


class Lengths(nn.Module):
    """Lengths as features: whole numbers to 10^5, scaled before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(2, WIDTH)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, lengths: Tensor) -> Tensor:
        long = lengths.float()
        return self.out(torch.tanh(self.encode(torch.stack([long.log() / 10, (long - 50_000) / 50_000], -1))))


def _graph(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.rand(size, size) < 0.95


def _tracked(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, size, WIDTH), size - 20 - 60 * torch.rand(2)


def _packed(size: int) -> tuple[Tensor, Tensor]:
    starts = torch.ones(2, size, dtype=torch.bool)
    starts[:, ::5] = False
    return torch.randn(2, size, WIDTH), starts


def _boxes(size: int) -> tuple[Tensor, Tensor]:
    corner = torch.randint(0, 300, (size, 2))
    return torch.randn(size, WIDTH), torch.cat([corner, corner + torch.randint(301, 1000, (size, 2))], -1)


def _voxels(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.rand(size, 3) * 7.9


def _stamped(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, size, WIDTH), 90_000 + torch.randint(1, 60, (2, size)).cumsum(1)


POINT = "whole numbers"
EXACT = {"output 1": Demand(0)}
CASES = (
    Case("count-by-triangle", TriangleCount, lambda n: torch.rand(2, n) < 0.99, POINT, Demand(3),
         "out 3; counts are exact",
         ("count",), EXACT, sizes=LONG),
    Case("degrees-by-product", Degrees, _graph, POINT, Demand(6), "map 3, product 2, division 1; degrees are exact",
         ("degree",), EXACT, sizes=(400, 640)),
    Case("soft-argmax", SoftArgmax, _tracked, POINT, Demand(3, 0.01, 1.0),
         "score 3, which moves a place by 2 in 200 and more", ("place",), sizes=LONG),
    Case("soft-argmax-sum", SoftArgmaxSum, _tracked, POINT, Demand(3, 0.01, 1.0),
         "score 3, which moves a place by 2 in 200 and more", sizes=LONG),
    Case("one-hot-lookup", OneHotLookup, lambda n: torch.randint(40, (n,)), POINT, Demand(5),
         "rows 2, out 3; years are exact", ("year",), EXACT),
    Case("packed-segments", Segments, _packed, POINT, Demand(9, 2.0),
         "query 3, scores 2, scaling 1, softmax 1, value 2; scores reach 2", sizes=(400, 600)),
    Case("masked-mean", MaskedMean, lambda n: (torch.randn(2, n, WIDTH), torch.rand(2, n) < 0.95), POINT, Demand(3),
         "encode 3; the count is exact", sizes=(700, 900)),
    Case("binary-codes", BinaryCodes, rows(12), POINT, Demand(3), "out 3; codes are exact", ("code",), EXACT),
    Case("ranks", Ranks, lambda n: torch.randn(n), POINT, Demand(6), "weigh 3, tanh 1, out 2; ranks are exact",
         tensors=EXACT, sizes=(300, 520)),
    Case("overlap-of-boxes", BoxAreas, _boxes, POINT, Demand(6), "out 3, product 3; overlaps are exact", tensors=EXACT),
    Case("confusion-counts", Confusion, lambda n: (torch.randint(3, (n,)), torch.randint(3, (n,))), POINT, Demand(0),
         "counts are exact", ("counts",), sizes=(5000, 8000)),
    Case("voxel-numbers", VoxelNumbers, _voxels, POINT, Demand(7), "map 3, product 2, out 2; numbers are exact",
         tensors=EXACT),
    Case("seconds-between", Gaps, _stamped, POINT, Demand(6), "encode 3, decay 1, product 2; gaps are exact",
         sizes=(16, 24)),
    Case("length-features", Lengths, lambda n: torch.randint(1, 100_000, (n,)), POINT, Demand(6),
         "encode 3, tanh 1, out 2; lengths are exact"),
)  # fmt: skip
