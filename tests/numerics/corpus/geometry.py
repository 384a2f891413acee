"""Frames, distances and directions in space: large coordinates of which small differences count."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp

__all__ = ["CASES"]

WIDTH = 16

# ---- proteins -------------------------------------------------------------------------------------------------------


def frames(points: Tensor) -> tuple[Tensor, Tensor]:
    """Rotations and origins of three atoms each, by Gram-Schmidt."""
    a, b, c = points.unbind(-2)
    x = F.normalize(c - b, dim=-1)
    y = a - b
    y = F.normalize(y - (x * y).sum(-1, keepdim=True) * x, dim=-1)
    return torch.stack([x, y, torch.linalg.cross(x, y)], -1), b


def seen_from(points: Tensor) -> Tensor:
    """All atoms in all frames."""
    turn, origin = frames(points)
    atoms = points.flatten(0, 1)
    return torch.einsum("fji,fnj->fni", turn, atoms[None] - origin[:, None])


class Structure(nn.Module):
    """Atoms of a chain in Ångström, far from the origin, which a layer moves a little."""

    def __init__(self) -> None:
        super().__init__()
        self.move, self.out = nn.Linear(WIDTH, 9), nn.Linear(WIDTH, 4)
        self.sharp = nn.Parameter(torch.tensor(0.1))

    def measure(self, atoms: Tensor, true: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, chain: Tensor) -> Tensor:
        return self.measure(chain + self.move(x).unflatten(-1, (3, 3)), chain)


class AlignedError(Structure):
    """FAPE: every atom in every frame, beside the true one, clamped."""

    def measure(self, atoms: Tensor, true: Tensor) -> Tensor:
        apart = (seen_from(atoms) - seen_from(true)).square().sum(-1)
        return (torch.sqrt(apart + 1e-4).clamp(max=10) / 10).mean()


class DistanceTest(Structure):
    """A smooth lDDT: the share of distances that are kept within four bounds."""

    def measure(self, atoms: Tensor, true: Tensor) -> Tensor:
        found, wanted = (torch.sqrt((p[:, None] - p[None]).square().sum(-1) + 1e-6)
                         for p in (atoms[:, 1], true[:, 1]))  # fmt: skip
        bounds = torch.tensor([0.5, 1.0, 2.0, 4.0])
        kept = torch.sigmoid(bounds - (found - wanted).abs()[..., None]).mean(-1)
        near = (wanted < 15) & ~torch.eye(len(wanted), dtype=torch.bool)
        return 1 - (kept * near).sum() / near.sum()


class BondLengths(Structure):
    """Violations: bonds that are longer or shorter than they should be by more than a little."""

    def measure(self, atoms: Tensor, true: Tensor) -> Tensor:
        length = (1e-6 + (atoms[1:, 0] - atoms[:-1, 2]).square().sum(-1)).sqrt()
        bond = (1e-6 + (atoms[:, 1] - atoms[:, 0]).square().sum(-1)).sqrt()
        return F.relu((length - 1.33).abs() - 0.2).mean() + F.relu((bond - 1.46).abs() - 0.2).mean()


class Dihedrals(Structure):
    """Torsion angles by cross products and atan2, as sines and cosines."""

    def measure(self, atoms: Tensor, true: Tensor) -> Tensor:
        a, b, c = (atoms[1:] - atoms[:-1]).unbind(-2)
        first, second = torch.cross(a, b, dim=-1), torch.cross(b, c, dim=-1)
        sine = (torch.cross(first, second, dim=-1) * b).sum(-1) / (b.norm(dim=-1) + 1e-6)
        angle = torch.atan2(sine, (first * second).sum(-1))
        return torch.stack([angle.sin(), angle.cos()], -1)


class PointAttention(Structure):
    """Invariant point attention: weights by distances of points in a common frame."""

    def measure(self, atoms: Tensor, true: Tensor) -> Tensor:
        turn, origin = frames(true)
        query = torch.einsum("nij,nj->ni", turn, atoms[:, 0] - true[:, 0]) + origin
        key = torch.einsum("nij,nj->ni", turn, atoms[:, 2] - true[:, 2]) + origin
        apart = (query[:, None] - key[None]).square().sum(-1)
        return (-F.softplus(self.sharp) / 2 * apart / 9).softmax(-1) @ (atoms[:, 1] - origin)


class Distogram(Structure):
    """Squared distances by a product, before their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.linspace(2, 22, 12) ** 2)

    def measure(self, atoms: Tensor, true: Tensor) -> Tensor:
        p = atoms[:, 1]
        square = p.square().sum(-1)
        apart = square[:, None] + square[None] - 2 * p @ p.T
        return torch.sigmoid(self.edges - apart[..., None]).mean(0)


class BackboneUpdates(nn.Module):
    """Frames composed of four small turns and steps, each of a quaternion (1, b, c, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.update = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(4))

    def turn(self, part: Tensor) -> Tensor:
        b, c, d = (0.2 * part).unbind(-1)
        n = torch.rsqrt(1 + b * b + c * c + d * d)
        a, b, c, d = n, b * n, c * n, d * n
        rows = (
            (a * a + b * b - c * c - d * d, 2 * b * c - 2 * a * d, 2 * b * d + 2 * a * c),
            (2 * b * c + 2 * a * d, a * a - b * b + c * c - d * d, 2 * c * d - 2 * a * b),
            (2 * b * d - 2 * a * c, 2 * c * d + 2 * a * b, a * a - b * b - c * c + d * d),
        )
        return torch.stack([torch.stack(row, -1) for row in rows], -2)

    def compose(self, frame: tuple[Tensor, Tensor], change: Tensor) -> tuple[Tensor, Tensor]:
        turn, origin = frame
        angle, step = change.chunk(2, -1)
        return turn @ self.turn(angle), origin + (turn @ step[..., None])[..., 0]

    def forward(self, x: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        frame = torch.eye(3).expand(len(x), 3, 3), origin
        for update in self.update:
            frame = self.compose(frame, update(x))
        return frame


# ---- equivariant networks -------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """Messages of all pairs of points, by features of what lies between them."""

    inputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.edge = nn.Linear(3, WIDTH), mlp(self.inputs, WIDTH, WIDTH)

    def between(self, points: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, points: Tensor) -> Tensor:
        other = ~torch.eye(len(points), dtype=torch.bool)
        message = self.edge(self.between(points)) * self.encode(points / 30)[None]
        return (message * other[..., None]).sum(1) / len(points)


def radial(apart: Tensor) -> Tensor:
    """Gaussians of a distance, and a cutoff."""
    return torch.exp(-4 * (apart[..., None] - torch.linspace(0, 4, 8)) ** 2) * (torch.cos(apart / 2) + 1)[..., None]


class Radial(Pairs):
    """SchNet."""

    inputs = 8

    def between(self, points: Tensor) -> Tensor:
        return radial((points[:, None] - points[None] + 1e-6).norm(dim=-1))


class Bessel(Pairs):
    """DimeNet's radial basis: sines of distances, over the distance."""

    inputs = 8

    def between(self, points: Tensor) -> Tensor:
        apart = torch.sqrt((points[:, None] - points[None]).square().sum(-1, keepdim=True) + 1e-2)
        return torch.sin(torch.arange(1, 9) * math.pi / 5 * apart) / apart


class SecondDegree(Pairs):
    """Spherical harmonics up to the second degree, of directions."""

    inputs = 9

    def between(self, points: Tensor) -> Tensor:
        step = points[:, None] - points[None]
        x, y, z = (step / (step.square().sum(-1, keepdim=True) + 1e-2).sqrt()).unbind(-1)
        two = [
            3**0.5 * x * z,
            3**0.5 * x * y,
            y * y - (x * x + z * z) / 2,
            3**0.5 * y * z,
            3**0.5 / 2 * (z * z - x * x),
        ]
        return torch.stack([torch.ones_like(x), x, y, z, *(3**0.5 * part for part in two)], -1)


class Angles(nn.Module):
    """Angles at each point between its neighbours in a chain, by atan2 of a cross and a dot product."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(7, WIDTH)

    def angle(self, points: Tensor) -> Tensor:
        a, b = points[2:] - points[1:-1], points[:-2] - points[1:-1]
        angle = torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(-1))
        return torch.cos(angle[:, None] * torch.arange(7))

    def forward(self, points: Tensor) -> Tensor:
        return self.out(self.angle(points))


class MovedPoints(nn.Module):
    """EGNN: coordinates that learned weights move along differences, with squared distances as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.ModuleList(mlp(1, WIDTH, 1) for _ in range(3))

    def apart(self, points: Tensor) -> tuple[Tensor, Tensor]:
        step = points[:, None] - points[None]
        return step, step.square().sum(-1, keepdim=True)

    def move(self, points: Tensor, step: Tensor, weight: Tensor) -> Tensor:
        return points + (step * weight).mean(1)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        start = points
        for weigh in self.weigh:
            step, apart = self.apart(points)
            points = self.move(points, step, 0.3 * torch.tanh(weigh(apart / 8)))
        return points, points - start


class VectorGates(nn.Module):
    """Geometric vector perceptron: norms of mixed vectors, which gate them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = nn.Linear(8, 6, bias=False), nn.Linear(6, 6)

    def forward(self, vectors: Tensor) -> Tensor:
        mixed = self.mix(vectors.transpose(-1, -2))
        size = torch.sqrt(mixed.square().sum(-2) + 1e-8)
        return mixed * torch.sigmoid(self.gate(size))[..., None, :]


class DirectionalNorm(nn.Module):
    """Vector neurons: the part of a vector against a learned direction is taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.along = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        v, d = self.value(vectors.mT), self.along(vectors.mT)
        dot = (v * d).sum(-2, keepdim=True)
        return 0.2 * v + 0.8 * torch.where(dot >= 0, v, v - dot / (d.square().sum(-2, keepdim=True) + 1e-6) * d)


class TensorProduct(nn.Module):
    """Vectors of two layers coupled to scalars, vectors and the second degree, by constants."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
        skew = torch.zeros(3, 3, 3)
        skew[[0, 1, 2], [1, 2, 0], [2, 0, 1]] = 0.5**0.5
        skew[[0, 1, 2], [2, 0, 1], [1, 2, 0]] = -(0.5**0.5)
        self.register_buffer("skew", skew)

    def couple(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outer = a[..., :, None, :] * b[..., None, :, :]
        trace = outer.diagonal(dim1=-3, dim2=-2).sum(-1)
        second = (outer + outer.transpose(-3, -2)) / 2 - trace[..., None, None, :] * torch.eye(3)[..., None] / 3
        return trace, torch.einsum("ijk,niw,njw->nkw", self.skew, a, b), second

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.couple(self.left(vectors.mT), self.right(vectors.mT))


def _chain(size: int) -> tuple[Tensor, Tensor]:
    """Three atoms a residue, 1.5 apart in a walk that begins 40 from the origin."""
    walk = 1.5 * F.normalize(torch.randn(3 * size, 3) + torch.tensor([0.8, 0.4, 0.0]), dim=-1)
    return torch.randn(size, WIDTH), 40 + walk.cumsum(0).unflatten(0, (size, 3))


def _cloud(size: int) -> Tensor:
    return 20 + 1.5 * torch.randn(size, 3)


def _vectors(size: int) -> Tensor:
    return torch.randn(size, 8, 3)


POINT, EQUIVARIANT = "geometry", "equivariant"
MEASURE, BETWEEN, MOVED = ("measure",), ("between",), "the layer that moves atoms 3; the rest is exact"


def _structure(name: str, build: type[Structure], condition: float, why: str = MOVED) -> Case:
    return Case(name, build, _chain, POINT, Demand(3, condition), why, MEASURE)


CASES = (
    _structure("aligned-error", AlignedError, 4.0),
    _structure("distance-test", DistanceTest, 2.0),
    _structure("bond-lengths", BondLengths, 2.0),
    _structure("dihedrals", Dihedrals, 4.0),
    _structure("point-attention", PointAttention, 4.0),
    _structure("distogram", Distogram, 4.0),
    Case("backbone-updates", BackboneUpdates, lambda n: (torch.randn(n, WIDTH), 40 + torch.randn(n, 3)), POINT,
         Demand(3), "each update 3, and they are small", ("compose",)),
    Case("radial-basis", Radial, _cloud, EQUIVARIANT, Demand(6), "two layers and an activation; distances are exact",
         BETWEEN),
    Case("bessel-basis", Bessel, _cloud, EQUIVARIANT, Demand(6), "two layers and an activation; distances are exact",
         BETWEEN),
    Case("second-degree", SecondDegree, _cloud, EQUIVARIANT, Demand(6),
         "two layers and an activation; directions are exact", BETWEEN),
    Case("angles", Angles, _cloud, EQUIVARIANT, Demand(3), "out 3; angles are exact", ("angle",)),
    Case("moved-points", MovedPoints, _cloud, EQUIVARIANT, Demand(7, 0.1, 1.0),
         "weights 7, of steps of a tenth; places are exact", ("apart", "move"), {"output 1": Demand(7)}),
    Case("vector-gates", VectorGates, _vectors, EQUIVARIANT, Demand(8), "mix 3, gate 3 and its sigmoid, product 1"),
    Case("directional", DirectionalNorm, _vectors, EQUIVARIANT, Demand(4, 2.0),
         "layers 3 and the dot product 1, each twice"),
    Case("tensor-product", TensorProduct, _vectors, EQUIVARIANT, Demand(6), "two layers 3 each", ("couple",)),
)  # fmt: skip
