"""Small constants that 16 bits round to zero or to one, and small values that they lose."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp, rows

__all__ = ["CASES"]

WIDTH = 16


class Encoded(nn.Module):
    """Something done to what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def finish(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.encode(x))


class ClampedOne(Encoded):
    """A bound of 1 - 1e-7 before a pole."""

    def finish(self, z: Tensor) -> Tensor:
        return torch.atanh(torch.tanh(3 * z).clamp(-1 + 1e-6, 1 - 1e-6)) / 3


class BufferEpsilon(Encoded):
    """An epsilon in a 0-d buffer, below float16's smallest number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("eps", torch.tensor(1e-12))

    def finish(self, z: Tensor) -> Tensor:
        z = F.relu(z - 3)  # most rows are zero
        return z / (z.sum(-1, keepdim=True) + self.eps) + z / torch.sqrt((z * z).sum(-1, keepdim=True) + self.eps)


class ParameterEpsilon(Encoded):
    """The same epsilon as a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.tensor(1e-10), requires_grad=False)

    def finish(self, z: Tensor) -> Tensor:
        z = F.relu(z - 3)
        return z / (z.amax(-1, keepdim=True) + self.eps)


class NumberEpsilon(Encoded):
    """A number of 1e-8 below a division of rows that may be zero."""

    def finish(self, z: Tensor) -> Tensor:
        z = F.relu(z - 3)
        return z / (z.norm(dim=-1, keepdim=True) + 1e-8)


class TinyScale(Encoded):
    """Scaled down by 1e-6 and up again, as physical units are."""

    def finish(self, z: Tensor) -> Tensor:
        metres = z * 1e-6
        return (metres + metres * metres) * 1e6


class LargeScale(Encoded):
    """Scaled up beyond float16, and down again by a logarithm."""

    def finish(self, z: Tensor) -> Tensor:
        return torch.log(1 + (F.softplus(z) * 1e4) ** 2)


class Underflow(Encoded):
    """A product of small probabilities: beneath float16."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.encode.bias, -4.0)

    def finish(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z[..., :4]).prod(-1) * 1e6


class Fading(Encoded):
    """Attention weights times a decay that falls to 1e-9, renormalised."""

    def finish(self, z: Tensor) -> Tensor:
        weight = z.softmax(-1) * torch.exp(-torch.arange(WIDTH, device=z.device) * 1.3)
        weight = weight[..., 8:]
        return weight / weight.sum(-1, keepdim=True)


class NearlyOne(nn.Module):
    """A decay of exp(-softplus(a) * dt) near one, applied many times: a state space model."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.into = nn.Parameter(torch.randn(WIDTH) - 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        keep = torch.exp(-F.softplus(self.rate) * 0.01)
        given = self.into(x)
        for i in range(12):
            state = keep * state + (1 - keep) * given[:, i]
        return state


class NegligibleLoss(nn.Module):
    """A main loss, and a penalty that weighs 1e-7 of a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.guess = mlp(WIDTH, 32, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        penalty = 1e-7 * self.energy(z)
        return F.mse_loss(self.guess(z).squeeze(-1), y), penalty

    def energy(self, z: Tensor) -> Tensor:
        return (z * 1e3).pow(2).sum()


class Gains(nn.Module):
    """Gains in a buffer of small numbers, which restore large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", 10.0 ** -torch.arange(4, 8).float().repeat(4))
        self.encode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x * self.gain)


class SmallLayerScale(nn.Module):
    """A branch is scaled by a parameter that starts at 1e-6, as in ConvNeXt, and scaled back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gain = (nn.Parameter(x * (1 + torch.rand(WIDTH))) for x in (1e-6, 3e4))
        self.encode, self.guess = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.guess(self.finish(self.encode(x)))

    def finish(self, z: Tensor) -> Tensor:
        return z * self.scale * self.gain


def _started(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 12, WIDTH), torch.randn(size, WIDTH) + 3


POINT = "epsilons"
DONE = ("finish",)
CASES = (
    Case("clamped-one", ClampedOne, rows(WIDTH), POINT, Demand(3),
         "encode 3; back from its own tanh",
         DONE),
    Case("buffer-epsilon", BufferEpsilon, lambda n: torch.randn(n, WIDTH) * 3, POINT, Demand(3, 6.0),
         "encode 3; of values near 3.5 three are taken", DONE),
    Case("parameter-epsilon", ParameterEpsilon, lambda n: torch.randn(n, WIDTH) * 3, POINT, Demand(3, 6.0),
         "encode 3; of values near 3.5 three are taken", DONE),
    Case("number-epsilon", NumberEpsilon, lambda n: torch.randn(n, WIDTH) * 3, POINT, Demand(3, 6.0),
         "encode 3; of values near 3.5 three are taken", DONE),
    Case("tiny-scale", TinyScale, rows(WIDTH), POINT, Demand(3), "encode 3", DONE),
    Case("small-layer-scale", SmallLayerScale, rows(WIDTH), POINT, Demand(6), "encode 3, guess 3", DONE),
    Case("large-scale", LargeScale, rows(WIDTH), POINT, Demand(3), "encode 3, below a logarithm", DONE),
    Case("product-of-probabilities", Underflow, rows(WIDTH), POINT, Demand(3, 8.0),
         "encode 3, of values near 4 in an exponent; four such errors add up to two", DONE),
    Case("fading-weights", Fading, rows(WIDTH), POINT, Demand(3), "encode 3, in an exponent", DONE),
    Case("nearly-one", NearlyOne, _started, "provenance", Demand(3, 0.05, 1.0),
         "into 3; the state takes up a few hundredths"),
    Case("negligible-penalty", NegligibleLoss, lambda n: (torch.randn(n, WIDTH), torch.randn(n)), POINT, Demand(8, 2.0),
         "encode 6, guess 2; both losses are squares", ("energy",)),
    Case("small-gains", Gains, lambda n: torch.randn(n, WIDTH) * 10.0 ** torch.arange(4, 8).float().repeat(4),
         "provenance",
         Demand(3), "encode 3; gains and inputs are exact"),
)  # fmt: skip
