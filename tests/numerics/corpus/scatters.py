"""Values added up by index: as sums, over as many as an index names, and order does not help."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand

__all__ = ["CASES"]

WIDTH = 16
GROUPS = 3


class Pool(nn.Module):
    """Hundreds of encoded rows into three groups, one index for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        return self.pool(self.encode(x), group)


class IndexAdd(Pool):
    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        return torch.zeros(GROUPS, WIDTH, device=rows.device, dtype=rows.dtype).index_add(0, group, rows)


class IndexAddInPlace(Pool):
    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        total = rows.new_zeros(GROUPS, WIDTH)
        total.index_add_(0, group, rows)
        return total


class ScatterAdd(Pool):
    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        return rows.new_zeros(GROUPS, WIDTH).scatter_add(0, group[:, None].expand_as(rows), rows)


class ScatterReduce(Pool):
    """A segment mean."""

    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        index = group[:, None].expand_as(rows)
        return rows.new_zeros(GROUPS, WIDTH).scatter_reduce(0, index, rows, "mean", include_self=False)


class ScatterMost(Pool):
    """A segment maximum before the layer: no sum."""

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        index = group[:, None].expand_as(x)
        return self.encode(x.new_zeros(GROUPS, WIDTH).scatter_reduce(0, index, x, "amax", include_self=False))


class IndexPut(Pool):
    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        return torch.index_put(rows.new_zeros(GROUPS, WIDTH), (group,), rows, accumulate=True)


class IndexAddColumn(Pool):
    """One value a row: a group's sum is a single number."""

    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        return rows.new_zeros(GROUPS).index_add(0, group, rows.square().sum(-1))


class ScatterAddColumn(Pool):
    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        return torch.zeros(GROUPS, device=rows.device).scatter_add(0, group, rows.float().norm(dim=-1))


class Product(Pool):
    """The same as a product with one-hot rows, whose kernel adds up in float32."""

    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        return F.one_hot(group, GROUPS).to(rows.dtype).T @ rows


class SegmentMean(Pool):
    """Sums and counts, both scattered."""

    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        total = rows.new_zeros(GROUPS, WIDTH).index_add(0, group, rows)
        count = rows.new_zeros(GROUPS).index_add(0, group, torch.ones_like(rows[:, 0]))
        return total / count.clamp_min(1)[:, None]


class SegmentSoftmax(Pool):
    """Attention over the edges of each node, as graph attention computes it."""

    def pool(self, rows: Tensor, group: Tensor) -> Tensor:
        score = rows[:, 0] * 2
        most = score.new_full((GROUPS,), -1e4).scatter_reduce(0, group, score, "amax")
        weight = torch.exp(score - most[group])
        total = weight.new_zeros(GROUPS).index_add(0, group, weight)
        weight = weight / (total[group] + 1e-16)
        return rows.new_zeros(GROUPS, WIDTH).index_add(0, group, rows * weight[:, None])


class MessagePassing(nn.Module):
    """A graph convolution: messages along edges, normalised by degrees that a scatter counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def spread(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = x.new_zeros(x.shape[0]).scatter_add(0, target, torch.ones_like(target, dtype=x.dtype))
        scale = degree.clamp_min(1).rsqrt()
        messages = x[source] * (scale[source] * scale[target])[:, None]
        return torch.zeros_like(x).index_add(0, target, messages)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        hidden = torch.tanh(self.spread(self.first(x), source, target))
        return self.spread(self.second(hidden), source, target)


class DegreeFeature(nn.Module):
    """In-degrees, scattered, as an input to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        degree = torch.zeros(x.shape[0], device=x.device)
        degree.scatter_add_(0, edges[1], torch.ones(edges.shape[1], device=x.device))
        return self.encode(torch.cat([x, degree[:, None].log1p()], -1)), degree


class SoftHistogram(nn.Module):
    """A histogram with linear weights: each value is shared between two bins."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = x.clamp(0, 0.999) * 7
        low = place.floor()
        share = place - low
        bins = torch.zeros(8, device=x.device)
        bins = bins.index_add(0, low.long(), 1 - share).index_add(0, low.long() + 1, share)
        return self.out(bins / bins.sum()), bins


class Splat(nn.Module):
    """Forward warping: pixels with learned values are added where they land, with a weight channel."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 4)

    def splat(self, value: Tensor, at: Tensor) -> Tensor:
        canvas = value.new_zeros(GROUPS, 5)
        return canvas.index_add(0, at, torch.cat([value, torch.ones_like(value[:, :1])], -1))

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        landed = self.splat(self.value(x), at)
        return landed[:, :4] / landed[:, 4:].clamp_min(1e-6), landed[:, 4]


class RoutedExperts(nn.Module):
    """A mixture of experts: results come back to their tokens by an accumulating put."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Embedding(64, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        gate, chosen = self.route(ids).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight = (gate * (chosen == i)).sum(-1, keepdim=True)
            out = out + expert(x) * weight
        return out


def _grouped(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH) + 1, torch.randint(GROUPS, (size,))


def _graph(size: int) -> tuple[Tensor, Tensor]:
    target = torch.randint(size, (80 * size,)) * torch.randint(0, 2, (80 * size,))  # the first is a hub
    return torch.randn(size, WIDTH) + 0.5, torch.stack([torch.randint(size, (80 * size,)), target])


def _routed(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randint(64, (size,))


POINT = "sums"
POOLED, POOLED_WHY = Demand(3), "encode 3; sums are exact"
SIZES = (1500, 2100)


def _pool(name: str, build: type[Pool], demand: Demand = POOLED, why: str = POOLED_WHY) -> Case:
    return Case(name, build, _grouped, POINT, demand, why, ("pool",), sizes=SIZES)


CASES = (
    _pool("index-add", IndexAdd),
    _pool("index-add-in-place", IndexAddInPlace),
    _pool("scatter-add", ScatterAdd),
    _pool("scatter-mean", ScatterReduce),
    Case("scatter-max", ScatterMost, _grouped, POINT, POOLED, "encode 3; a maximum is exact"),
    _pool("index-put-accumulate", IndexPut),
    _pool("index-add-column", IndexAddColumn, Demand(3, 2.0), "encode 3, squared; sums are exact"),
    _pool("scatter-add-column", ScatterAddColumn),
    _pool("pool-by-product", Product),
    _pool("segment-mean", SegmentMean),
    _pool("segment-softmax", SegmentSoftmax, Demand(3, 3.0), "encode 3, as a value and twice in an exponent"),
    Case("message-passing", MessagePassing, _graph, POINT, Demand(6), "first 3, tanh 1, second 2; sums are exact",
         ("spread",), sizes=(16, 24)),
    Case("degree-feature", DegreeFeature, _graph, POINT, Demand(3), "encode 3; degrees are exact",
         tensors={"output 1": Demand(0)}, sizes=(16, 24)),
    Case("soft-histogram", SoftHistogram, lambda n: torch.rand(n), POINT, Demand(3), "out 3; bins are exact",
         tensors={"output 1": Demand(0)}, sizes=SIZES),
    Case("splat", Splat, _grouped, POINT, Demand(3), "value 3; weights are exact", ("splat",),
         {"output 1": Demand(0)}, sizes=SIZES),
    Case("routed-experts", RoutedExperts, _routed, "provenance", Demand(5), "expert 3, weight 1, sum 1"),
)  # fmt: skip
