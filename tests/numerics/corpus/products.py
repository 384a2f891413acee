"""Products by name that are none by shape: nothing to add up, or a single number to add up to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import rows

__all__ = ["CASES"]

WIDTH = 16


class LinearOfTime(nn.Module):
    """A layer of one feature, the time, whose result is a phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.out = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, time: Tensor) -> Tensor:
        return self.out(torch.sin(self.phase(time)))


class PlaceEmbedding(nn.Module):
    """PointNet and PointTransformer: coordinates in metres, far from the origin, through a layer of three."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)

    def relative(self, points: Tensor) -> Tensor:
        place = self.place(points)
        return place[:, None] - place[None]

    def forward(self, points: Tensor) -> Tensor:
        return self.out(torch.tanh(self.relative(points))).mean(1)


class KroneckerWeight(nn.Module):
    """A weight as a Kronecker product, near a far constant."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("base", torch.randn(WIDTH, WIDTH))

    def weight(self) -> Tensor:
        return torch.kron(self.left, self.right)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.base + 1e-3 * self.weight()
        return x @ weight, weight - self.base


class RankOneUpdate(nn.Module):
    """A fast weight that outer products change a little (addr)."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def update(self, fast: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.addr(fast, key, value, alpha=1e-3)

    def forward(self, x: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        start = fast
        for i in range(4):
            fast = self.update(fast, self.key(x[i]).to(fast.dtype), self.value(x[i]).to(fast.dtype))
        return fast, fast - start


class DeltaRule(RankOneUpdate):
    """The same by einsum over a batch, with nothing contracted (linear transformers, DeltaNet)."""

    def update(self, fast: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fast + 1e-3 * torch.einsum("i,j->ij", key, value)


class OuterByMatmul(RankOneUpdate):
    """The same as a product of a column with a row."""

    def update(self, fast: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fast + 1e-3 * key[:, None] @ value[None]


class FrequencyGrid(nn.Module):
    """Rotary angles in two dimensions as transformers write them: `inv_freq[:, None] @ position[None]`."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rate", 10000.0 ** (-torch.arange(8) / 8))

    def angles(self, places: Tensor) -> Tensor:
        rate = self.rate[None, :, None].expand(places.shape[0], -1, 1)
        return (rate @ places[:, None, :].float()).transpose(1, 2)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        angles = self.angles(places)
        turned = torch.cat([angles, angles], -1)
        query = self.query(x)
        half = torch.cat([-query[..., 8:], query[..., :8]], -1)
        return query * turned.cos() + half * turned.sin()


class ColourMatrix(nn.Module):
    """Colours through a matrix of 3 x 3 in float32 units of 0..255, and small differences after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "matrix", torch.tensor([[0.299, 0.587, 0.114], [-0.169, -0.331, 0.5], [0.5, -0.419, -0.081]])
        )
        self.out = nn.Conv2d(3, 4, 3)

    def planes(self, x: Tensor) -> Tensor:
        return torch.einsum("ij,bjhw->bihw", self.matrix, x)

    def forward(self, x: Tensor) -> Tensor:
        planes = self.planes(x)
        return self.out(planes - planes.mean((2, 3), keepdim=True))


class PairEnergy(nn.Module):
    """One number a row by einsum, as a difference of two that nearly agree."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 64)

    def energy(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bd,bd->b", a, b)

    def forward(self, x: Tensor) -> Tensor:
        moved = x + 0.01 * self.encode(x)
        return self.energy(moved, moved) - self.energy(x, x)


class Bilinear(nn.Module):
    """A bilinear score of pairs with one output: nothing is shared between rows."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.score(x, y)


def _timed(size: int) -> Tensor:
    return torch.rand(size, 1) * 500


def _fast(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(WIDTH, WIDTH)


def _placed(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, size, WIDTH), torch.arange(size).expand(2, -1)


POINT = "shape"
CHANGED = "key and value 3 each; four outer products of a thousandth"
GONE = {"output 1": Demand(6)}
CASES = (
    Case("linear-of-time", LinearOfTime, _timed, POINT, Demand(3), "out 3; phases are exact", ("phase",)),
    Case("places-in-metres", PlaceEmbedding, lambda n: 100 + torch.randn(n, 3), POINT, Demand(4),
         "out 3, mean 1; places are exact", ("relative",)),
    Case("kronecker-weight", KroneckerWeight, rows(WIDTH), POINT, Demand(3), "product 3; the weight is exact",
         ("weight",),
         {"output 1": Demand(0)}),
    Case("rank-one-update", RankOneUpdate, _fast, POINT, Demand(6, 1e-3, 1.0), CHANGED, ("update",), GONE),
    Case("outer-by-einsum", DeltaRule, _fast, POINT, Demand(6, 1e-3, 1.0), CHANGED, ("update",), GONE),
    Case("outer-by-matmul", OuterByMatmul, _fast, POINT, Demand(6, 1e-3, 1.0), CHANGED, ("update",), GONE),
    Case("frequencies-by-matmul", FrequencyGrid, _placed, POINT, Demand(6),
         "query 3, cosine or sine 1, product 1, sum 1; angles are exact", ("angles",), sizes=(300, 520)),
    Case("colour-matrix", ColourMatrix, lambda n: 200 + torch.rand(n, 3, 8, 8) * 8, POINT, Demand(4),
         "out 3, mean 1; planes are exact",
         ("planes",)),
    Case("energy-difference", PairEnergy, rows(64), POINT, Demand(4), "encode 3, scaling 1; energies are exact",
         ("energy",)),
    Case("bilinear-score", Bilinear, lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)), POINT, Demand(6),
         "inputs, weight and two results"),
)  # fmt: skip
