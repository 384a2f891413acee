"""Squares and their sums, written as products: they leave float16's range, and small differences vanish in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp, rows

__all__ = ["CASES"]

WIDTH = 64


class Squared(nn.Module):
    """Something of the squares of what a layer gives, which reach hundreds."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def reduce(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.encode(x))


class SumOfProducts(Squared):
    def reduce(self, z: Tensor) -> Tensor:
        z = z * 300
        return ((z * z).sum(-1) / WIDTH).sqrt()


class EinsumNorm(Squared):
    """A norm by einsum to one number a row."""

    def reduce(self, z: Tensor) -> Tensor:
        z = z * 300
        return torch.einsum("bd,bd->b", z, z).sqrt()


class ProductNorm(Squared):
    """A norm by a product of each row with itself."""

    def reduce(self, z: Tensor) -> Tensor:
        z = z * 300
        return torch.bmm(z[:, None], z[:, :, None]).flatten().sqrt()


class DotEnergy(Squared):
    """An energy of all values by one dot product."""

    def reduce(self, z: Tensor) -> Tensor:
        z = (z * 100).flatten()
        return torch.dot(z, z).log()


class RmsByHand(Squared):
    """RMS normalisation of values whose squares leave float16's range."""

    def reduce(self, z: Tensor) -> Tensor:
        return self.out(self.norm(z))

    def norm(self, z: Tensor) -> Tensor:
        z = z * 500
        return z * torch.rsqrt((z * z).mean(-1, keepdim=True) + 1e-6)


class LayerNormByHand(RmsByHand):
    def norm(self, z: Tensor) -> Tensor:
        z = z * 500
        centred = z - z.mean(-1, keepdim=True)
        return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt()


class WeightNorm(nn.Module):
    """A weight with a norm of its own: the sum of its squares."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.size = nn.Parameter(torch.randn(8, WIDTH) * 300), nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        norm = (self.direction * self.direction).sum(-1, keepdim=True).sqrt()
        return F.linear(x, self.size * self.direction / norm)


class Demodulated(nn.Module):
    """StyleGAN2: weights scaled by a style, divided by the root of their sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.style = nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.randn(5, 6, 3, 3))

    def modulate(self, style: Tensor) -> Tensor:
        weight = self.weight * (style * 100)[:, None, :, None, None]
        return weight * torch.rsqrt((weight * weight).sum((2, 3, 4), keepdim=True) + 1e-8)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        weight = self.modulate(self.style(code)).flatten(0, 1)
        return F.conv2d(x.flatten(0, 1)[None], weight, padding=1, groups=x.shape[0])


class Apart(nn.Module):
    """Distances of points that lie close together and far from the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.sharp = nn.Parameter(torch.tensor(0.5))

    def apart(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * a).sum(-1)[:, None] + (b * b).sum(-1)[None] - 2 * a @ b.T

    def forward(self, points: Tensor) -> Tensor:
        apart = self.apart(points, points)
        return torch.exp(-self.sharp * apart) @ self.encode(points / 20)


class ApartByMatmul(Apart):
    """PointNet++: the three terms added in place."""

    def apart(self, a: Tensor, b: Tensor) -> Tensor:
        total = -2 * torch.matmul(a, b.transpose(0, 1))
        total += torch.sum(a**2, -1)[:, None]
        total += torch.sum(b**2, -1)[None]
        return total


class ApartFarOut(Apart):
    """The same of encoded vectors of 64 numbers with a common part."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 4)

    def forward(self, points: Tensor) -> Tensor:
        near = torch.softmax(-self.apart(points, points) / 8, -1)
        return near @ self.encode(points)


class NearestCode(Apart):
    """The distance to the nearest code of a codebook, far from the origin."""

    def forward(self, points: Tensor, codes: Tensor) -> Tensor:
        return self.apart(points, codes).amin(-1)


class Loudness(nn.Module):
    """The mean square of a loud signal, by ``x * x``: it leaves float16 before the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def level(self, y: Tensor) -> Tensor:
        return (y * y).mean(-1) * 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return self.level(self.encode(x) * 1000)


class Variance(nn.Module):
    """The spread of inputs about a far mean, by hand, which scales an output."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        spread = ((x - mean) * (x - mean)).mean(-1, keepdim=True)
        return self.encode((x - mean) / (spread + 1e-6).sqrt())


class Similar(nn.Module):
    """SimSiam: a cosine by hand of vectors of some hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.predict = mlp(WIDTH, 32, WIDTH), nn.Linear(WIDTH, WIDTH)

    def cosine(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a * 800, b * 800
        return (a * b).sum(-1) / ((a * a).sum(-1).sqrt() * (b * b).sum(-1).sqrt() + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        return self.cosine(self.predict(z), z.detach())


def _styled(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6, 8, 8), torch.randn(size, 8)


def _cloud(size: int) -> Tensor:
    return torch.tensor([30.0, -20.0, 10.0]) + torch.randn(size, 3)


def _far(size: int) -> Tensor:
    """Vectors that lie close together and far from the origin."""
    return 8 + torch.randn(size, WIDTH) * 0.3


POINT = "squares"
REDUCE, NORM = ("reduce",), ("norm",)
CASES = (
    Case("sum-of-products", SumOfProducts, rows(WIDTH), POINT, Demand(3), "encode 3", REDUCE),
    Case("norm-by-einsum", EinsumNorm, rows(WIDTH), POINT, Demand(3), "encode 3", REDUCE),
    Case("norm-by-product", ProductNorm, rows(WIDTH), POINT, Demand(3), "encode 3", REDUCE),
    Case("energy-by-dot", DotEnergy, rows(WIDTH), POINT, Demand(3), "encode 3, below a logarithm", REDUCE),
    Case("rms-by-hand", RmsByHand, rows(WIDTH), POINT, Demand(6), "encode 3, norm 1, out 2", NORM),
    Case("layer-norm-by-hand", LayerNormByHand, rows(WIDTH), POINT, Demand(6), "encode 3, norm 1, out 2", NORM),
    Case("weight-norm", WeightNorm, rows(WIDTH), POINT, Demand(3), "product 3; the weight is exact before"),
    Case("demodulated-weights", Demodulated, _styled, POINT, Demand(6), "style 3, weight 1, convolution 2",
         ("modulate",)),
    Case("near-points", Apart, _cloud, POINT, Demand(7), "encode 3, kernel 2, product 2; distances are exact",
         ("apart",)),
    Case("near-points-in-place", ApartByMatmul, _cloud, POINT, Demand(7),
         "encode 3, kernel 2, product 2; distances are exact",
         ("apart",)),
    Case("near-vectors", ApartFarOut, lambda n: 4 * torch.ones(WIDTH) + torch.randn(n, WIDTH) * 0.3, POINT, Demand(6),
         "encode 3, softmax 1, product 2; distances are exact", ("apart",)),
    Case("nearest-code", NearestCode, lambda n: (_far(n), _far(12)), POINT, Demand(0), "none is rounded", ("apart",)),
    Case("loudness", Loudness, rows(WIDTH), POINT, Demand(3, 2.0), "encode 3, squared", ("level",)),
    Case("variance-by-hand", Variance, lambda n: 50 + torch.randn(n, WIDTH) * 0.5, POINT, Demand(3),
         "encode 3; its input is exact"),
    Case("cosine-by-hand", Similar, rows(WIDTH), POINT, Demand(8, 3.0),
         "encode 6, predict 2; the cosine is near a third",
         ("cosine",)),
)  # fmt: skip
