"""Sparse graphs: messages along edges, sums over as many as a node has, and adjacencies that degrees normalise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp

__all__ = ["CASES"]

WIDTH, HEADS = 16, 4


def gathered(message: Tensor, target: Tensor, nodes: int) -> Tensor:
    """The sum of what arrives at each node."""
    return message.new_zeros(nodes, *message.shape[1:]).index_add(0, target, message)


class Graph(nn.Module):
    """A layer of every node, and what edges make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.spread(self.encode(x), *edges)


class Normalised(Graph):
    """GCN by a dense adjacency, D^-1/2 (A + I) D^-1/2."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        n = len(z)
        adjacency = torch.zeros(n, n).index_put((target, source), torch.ones(len(source)), accumulate=True)
        adjacency = adjacency + torch.eye(n)
        scale = adjacency.sum(-1).pow(-0.5)
        return scale[:, None] * adjacency * scale @ z


class Sparse(Graph):
    """The same by a sparse product."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = torch.bincount(target, minlength=len(z)).clamp(min=1).to(z)
        weight = degree.rsqrt()[source] * degree.rsqrt()[target]
        return gathered(z[source] * weight[:, None], target, len(z))


class Deviation(Graph):
    """PNA: a mean, and a deviation as mean(x²) - mean(x)², of what arrives."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        z = z + 4
        count = gathered(torch.ones(len(source), 1), target, len(z)).clamp(min=1)
        mean = gathered(z[source], target, len(z)) / count
        square = gathered(z[source] * z[source], target, len(z)) / count
        return torch.cat([mean, torch.sqrt(F.relu(square - mean * mean) + 1e-3)], -1)


class DenseDeviation(Graph):
    """The same by a product with a dense adjacency."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        z, n = z + 4, len(z)
        share = torch.zeros(n, n).index_put((target, source), torch.ones(len(source)), accumulate=True)
        share = share / share.sum(-1, keepdim=True).clamp(min=1)
        mean = share @ z
        return torch.cat([mean, torch.sqrt(F.relu(share @ z.square() - mean.square()) + 1e-3)], -1)


class Attended(Graph):
    """GAT: scores of both ends by a leaky unit, and a softmax over what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Parameter(torch.randn(HEADS, 4)), nn.Parameter(torch.randn(HEADS, 4))

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        z = z.unflatten(-1, (HEADS, 4))
        score = F.leaky_relu((z * self.far).sum(-1)[source] + (z * self.near).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(score)
        most = torch.full((len(z), HEADS), -1e4).scatter_reduce(0, index, score, "amax").detach()
        weight = torch.exp(score - most[target])
        weight = weight / (gathered(weight, target, len(z))[target] + 1e-16)
        return gathered(z[source] * weight[..., None], target, len(z)).flatten(1)


class DenseAttended(Graph):
    """The same over all pairs, with a mask."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        n = len(z)
        linked = torch.eye(n, dtype=torch.bool).index_put((target, source), torch.ones((), dtype=torch.bool))
        score = F.leaky_relu(z[:, :8].sum(-1)[:, None] + z[:, 8:].sum(-1)[None], 0.2)
        return score.masked_fill(~linked, -9e15).softmax(-1) @ z


class Teleported(Graph):
    """APPNP: ten steps of a random walk that returns."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = gathered(torch.ones(len(source)), target, len(z)).clamp(min=1)
        start = z
        for _ in range(10):
            z = 0.9 * gathered(z[source] / degree[target][:, None], target, len(z)) + 0.1 * start
        return z


class Chebyshev(Graph):
    """Polynomials of a Laplacian, each twice the last but for what went before."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(4))

    def laplacian(self, n: int, source: Tensor, target: Tensor) -> Tensor:
        adjacency = torch.zeros(n, n).index_put((target, source), torch.ones(()))
        adjacency = torch.maximum(adjacency, adjacency.T)
        scale = adjacency.sum(-1).clamp(min=1).rsqrt()
        return -(scale[:, None] * adjacency * scale)

    def polynomials(self, z: Tensor, source: Tensor, target: Tensor) -> list[Tensor]:
        laplacian = self.laplacian(len(z), source, target)
        found = [z, laplacian @ z]
        for _ in range(2):
            found.append(2 * (laplacian @ found[-1]) - found[-2])
        return found

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        found = self.polynomials(z, source, target)
        return torch.stack([mix(part) for mix, part in zip(self.mix, found, strict=True)]).sum(0)


class Isomorphism(Graph):
    """GIN: a sum, with a little more of the node itself."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.net = nn.Parameter(torch.tensor(1e-3)), mlp(WIDTH, 32, 8)

    def collect(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return (1 + self.more) * z + gathered(z[source], target, len(z)) / 16

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return self.net(self.collect(z, source, target))


class PairNorm(Graph):
    """Nodes centred, and scaled by the mean of their squared norms."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        z = 0.1 * (z + gathered(z[source], target, len(z)) / 32) + 2
        centred = z - z.mean(0)
        return centred / (1e-6 + centred.square().sum(1).mean()).sqrt()


class PowerMean(Graph):
    """A power mean of what arrives, with a learned power."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(3.0))

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        z = F.softplus(z) + 0.1
        count = gathered(torch.ones(len(source), 1), target, len(z)).clamp(min=1)
        return (gathered(z[source] ** self.power, target, len(z)) / count + 1e-7) ** (1 / self.power)


class Smoothness(Graph):
    """The Dirichlet energy of features: squares of differences along edges, scaled by degrees."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = gathered(torch.ones(len(source)), target, len(z)) + 1
        z = (1 + 0.1 * z) / degree.sqrt()[:, None]
        return (z[source] - z[target]).square().sum(-1).mean()


class Edges(Graph):
    """Gated edges (GatedGCN): sums of messages over sums of gates."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        gate = torch.sigmoid(z[source] + z[target] - 3)
        total = gathered(gate * z[source], target, len(z))
        return total / (gathered(gate, target, len(z)) + 1e-6)


class Readout(Graph):
    """Set2Set's step: one softmax over the nodes of each of three graphs, and their weighted sums."""

    def spread(self, z: Tensor, source: Tensor, target: Tensor) -> Tensor:
        graph = torch.arange(len(z)) % 3
        score = (z * z.detach().mean(0)).sum(-1)
        weight = torch.exp(score - score.amax().detach())
        return gathered(weight[:, None] * z, graph, 3) / gathered(weight, graph, 3)[:, None]


def _graph(size: int) -> tuple[Tensor, Tensor]:
    edges = 40 * size
    target = torch.randint(size, (edges,)) * torch.randint(0, 2, (edges,))  # the first is a hub
    return torch.randn(size, WIDTH) + 0.5, torch.stack([torch.randint(size, (edges,)), target])


POINT = "graphs"
SPREAD, SIZES = ("spread",), (16, 24)
EXACT, WHY = Demand(3), "encode 3; the rest is exact"


def _spread(
    name: str, build: type[Graph], demand: Demand = EXACT, why: str = WHY, islands: tuple[str, ...] = SPREAD
) -> Case:
    return Case(name, build, _graph, POINT, demand, why, islands, sizes=SIZES)


CASES = (
    _spread("dense-adjacency", Normalised),
    _spread("edge-weights", Sparse),
    _spread("deviation-of-neighbours", Deviation, Demand(4, 4), "encode 3, offset 1; a mean four times the deviation"),
    _spread("dense-deviation", DenseDeviation, Demand(4, 4), "encode 3, offset 1; a mean four times the deviation"),
    _spread("graph-attention", Attended, Demand(3, 3.0), "encode 3, as a value and twice in an exponent"),
    _spread("dense-graph-attention", DenseAttended, Demand(3, 4.0), "encode 3, as a value and in a sum of eight"),
    _spread("teleported-walk", Teleported),
    _spread("chebyshev", Chebyshev, Demand(5, 2.0), "encode 3, mix 2; three times what is left", ("polynomials",)),
    _spread("isomorphism", Isomorphism, Demand(8), "encode 3, two layers and a tanh 5", ("collect",)),
    _spread("pair-norm", PairNorm),
    _spread("power-mean", PowerMean),
    _spread("dirichlet-energy", Smoothness, Demand(3, 2.0), "encode 3, squared"),
    _spread("gated-edges", Edges, Demand(3, 2.0), "encode 3, as a value and in a gate"),
    _spread("readout", Readout, Demand(3, 4.0), "encode 3, as a value and squared in an exponent"),
)
