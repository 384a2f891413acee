"""Ops that cannot use a rounded operand: phases, poles, and whatever makes an index."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp, rows

__all__ = ["CASES"]

WIDTH = 16


class Siren(nn.Module):
    """Sines of learned phases, whose offsets are learned too and large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, 3)
        self.offset = nn.Parameter(torch.rand(32) * 200)

    def wave(self, z: Tensor) -> Tensor:
        return torch.sin(2.0 * z + self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.wave(self.first(x)))


class KernelFeatures(nn.Module):
    """Random features of a Gaussian kernel: cosines with phases of several turns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.rand(32) * 2 * math.pi + 60 * math.pi)
        self.encode, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(math.sqrt(2 / 32) * torch.cos(self.encode(x) + self.shift))


class ComplexWaves(nn.Module):
    """Complex exponentials of phases, as state space models and spectral layers write them."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(WIDTH) * 2)
        self.out = nn.Linear(2 * WIDTH, 3)

    def forward(self, time: Tensor) -> Tensor:
        waves = torch.exp(1j * (time[:, None] * self.rate))
        return self.out(torch.cat([waves.real, waves.imag], -1))


class SineSource(nn.Module):
    """The harmonic source of a vocoder: sines of a running sum of a pitch contour."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(WIDTH, 1)

    def forward(self, pitch: Tensor) -> Tensor:
        harmonics = torch.arange(1, WIDTH + 1, device=pitch.device)
        phase = torch.cumsum(pitch[..., None] * harmonics / 16000, 1) % 1
        return torch.tanh(self.merge(torch.sin(2 * math.pi * phase)))


class LogComplement(nn.Module):
    """A survival likelihood: log(1 - p) of confident probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 8)

    def likelihood(self, score: Tensor) -> Tensor:
        hazard = torch.sigmoid(4 + 2 * score)
        return torch.log(1 - hazard).sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.likelihood(self.score(x))


class Odds(LogComplement):
    """p / (1 - p): a division by a difference."""

    def likelihood(self, score: Tensor) -> Tensor:
        p = torch.sigmoid(4 + score)
        return p / (1 - p)


class LogOdds(LogComplement):
    """Back from probabilities to scores, as DETR does to refine boxes."""

    def likelihood(self, score: Tensor) -> Tensor:
        reference = torch.sigmoid(score * 3)
        return torch.sigmoid(torch.logit(reference, eps=1e-6) + score)


class Margin(nn.Module):
    """An additive angular margin: the angle to class centres that are close."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 6)
        self.centres = nn.Parameter(F.normalize(torch.randn(5, 6), dim=-1))

    def angle(self, z: Tensor) -> Tensor:
        near = F.normalize(self.centres + 0.1 * torch.tanh(z)[:, None], dim=-1)
        cosine = (near * F.normalize(self.centres, dim=-1)).sum(-1)
        return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        angle = self.angle(self.encode(x))
        return 16 * torch.cos(angle + 0.5)


class Hyperbolic(nn.Module):
    """Distances in the Poincaré ball between points near its edge."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 6)
        self.anchor = nn.Parameter(torch.randn(6) * 0.1)

    def distance(self, z: Tensor) -> Tensor:
        norm = z.pow(2).sum(-1, keepdim=True).add(1e-6).sqrt()
        point = z / norm * torch.tanh(1.5 + norm)
        apart = (point - self.anchor).pow(2).sum(-1)
        inside = (1 - point.pow(2).sum(-1)) * (1 - self.anchor.pow(2).sum())
        return torch.acosh(1 + 2 * apart / inside)

    def forward(self, x: Tensor) -> Tensor:
        return self.distance(self.encode(x))


class HandMoments(nn.Module):
    """Standardised by E[x^2] - E[x]^2, with a mean far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.out = nn.Linear(WIDTH, 64), nn.Linear(64, 4)
        nn.init.constant_(self.encode.bias, 6.0)

    def standardise(self, z: Tensor) -> Tensor:
        mean = z.mean(-1, keepdim=True)
        variance = (z * z).mean(-1, keepdim=True) - mean * mean
        return (z - mean) * torch.rsqrt(variance + 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.standardise(self.encode(x)))


class HashGrid(nn.Module):
    """Features at the corners of fine cells, found by rounding down coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(1024, 4), nn.Linear(8, 3)

    def forward(self, points: Tensor) -> Tensor:
        found: list[Tensor] = []
        for cells in (64.0, 700.0):
            scaled = points * cells
            corner = torch.floor(scaled)
            part = scaled - corner
            mixed = torch.zeros(points.shape[0], 4, device=points.device)
            for i in (0, 1):
                for j in (0, 1):
                    x, y = corner.long().unbind(-1)
                    index = ((x + i) * 1 ^ (y + j) * 2654435761) % 1024
                    weight = (part[:, :1] if i else 1 - part[:, :1]) * (part[:, 1:] if j else 1 - part[:, 1:])
                    mixed = mixed + self.table(index) * weight
            found.append(mixed)
        return self.out(torch.cat(found, -1))


class Quantised(nn.Module):
    """Pixels rounded to 255 levels, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        level = torch.round(x * 255) / 255
        return self.out(x + (level - x).detach())


class LevelsOfInput(nn.Module):
    """An amplitude that picks one of 1,000 embedded levels (mu-law, quantised audio)."""

    def __init__(self) -> None:
        super().__init__()
        self.levels, self.out = nn.Embedding(1000, WIDTH), nn.Linear(2 * WIDTH, 4)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        squeezed = torch.sign(x) * torch.log1p(255 * x.abs()) / math.log1p(255)
        level = ((squeezed + 1) / 2 * 999 + 0.5).long()
        return self.out(torch.cat([self.levels(level[:, 0]), self.mix(x)], -1)), level


class BinnedReturns(nn.Module):
    """Scaled rewards in buckets, one-hot: a distributional critic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.linspace(-10, 10, 500))
        self.critic = nn.Linear(WIDTH, 501)

    def forward(self, x: Tensor, reward: Tensor) -> Tensor:
        target = F.one_hot(torch.bucketize(reward * 0.99 + 0.123, self.edges), 501)
        return -(target * self.critic(x).log_softmax(-1)).sum(-1)


class WrappedAngle(nn.Module):
    """A heading that is corrected a little and wrapped to one turn."""

    def __init__(self) -> None:
        super().__init__()
        self.correct = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, heading: Tensor) -> Tensor:
        turned = heading + 0.01 * self.correct(x)
        wrapped = torch.remainder(turned + math.pi, 2 * math.pi) - math.pi
        return torch.cat([wrapped.cos(), wrapped.sin()], -1)


class Dirichlet(nn.Module):
    """Evidential classification: log-gammas and digammas of a concentration."""

    def __init__(self) -> None:
        super().__init__()
        self.evidence = nn.Linear(WIDTH, 5)

    def divergence(self, score: Tensor) -> Tensor:
        alpha = F.softplus(score * 3) * 20 + 1
        total = alpha.sum(-1, keepdim=True)
        log_norm = torch.lgamma(total).squeeze(-1) - torch.lgamma(alpha).sum(-1)
        return log_norm + ((alpha - 1) * (torch.digamma(alpha) - torch.digamma(total))).sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.divergence(self.evidence(x))


class Entropy(nn.Module):
    """The entropy of a policy, by hand, beside its probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.score = mlp(WIDTH, 32, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(self.score(x) * 4, -1)
        return -torch.xlogy(p, p).sum(-1), p


def _rewarded(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.rand(size) * 16 - 8


def _headed(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.rand(size, 1) * 300 + 400


def _contour(size: int) -> Tensor:
    return 200 + 20 * torch.randn(2, size).cumsum(1) / size**0.5


POINT = "demand"
CASES = (
    Case("siren-offsets", Siren, rows(WIDTH), POINT, Demand(6),
         "first 3 (phases near 1 beyond the offset), sine 1, out 2",
         ("wave",)),
    Case("kernel-features", KernelFeatures, rows(WIDTH), POINT, Demand(6),
         "encode 3, of phases near 1; cosine 1, out 2"),
    Case("complex-exponential", ComplexWaves, lambda n: torch.rand(n) * 300, POINT, Demand(3),
         "out 3; phases are exact"),
    Case("sine-source", SineSource, _contour, POINT, Demand(4), "merge 3, tanh 1; phases are exact", sizes=(200, 320)),
    Case("log-complement", LogComplement, rows(WIDTH), POINT, Demand(3), "score 3; the sum is 4 + 2 z, its error 2 z",
         ("likelihood",)),
    Case("odds", Odds, rows(WIDTH), POINT, Demand(3, 1.5), "score 3, in an exponent; scores stay below 1.5",
         ("likelihood",)),
    Case("log-odds", LogOdds, rows(WIDTH), POINT, Demand(3, 2.0), "score 3, times 4 in an exponent of slope a quarter",
         ("likelihood",)),
    Case("angular-margin", Margin, rows(WIDTH), POINT, Demand(3, 0.2, 1.0),
         "encode 3, which move a centre by a tenth of its length or two", ("angle",)),
    Case("hyperbolic-distance", Hyperbolic, rows(WIDTH), POINT, Demand(3, 1.0, 2.0),
         "encode 3; the distance grows as the norm", ("distance",)),
    Case("moments-by-hand", HandMoments, rows(WIDTH), POINT, Demand(5, 10.0),
         "encode 3 on values of 6 with a spread of 0.6, out 2", ("standardise",)),
    Case("hash-grid", HashGrid, lambda n: torch.rand(n, 2), POINT, Demand(3), "out 3; cells and weights are exact"),
    Case("rounded-pixels", Quantised, lambda n: torch.rand(n, WIDTH), POINT, Demand(3), "out 3; levels are exact"),
    Case("mu-law-levels", LevelsOfInput, lambda n: torch.rand(n, WIDTH) * 2 - 1, POINT, Demand(5),
         "mix 3, out 2; levels are exact"),
    Case("bucketed-rewards", BinnedReturns, _rewarded, POINT, Demand(4), "critic 3, log-softmax 1; buckets are exact"),
    Case("wrapped-heading", WrappedAngle, _headed, POINT, Demand(4, 0.02, 1.0),
         "correct 3, scaled to a hundredth of a radian"),
    Case("dirichlet-divergence", Dirichlet, rows(WIDTH), POINT, Demand(3, 3.0),
         "evidence 3, times 3 below a softplus", ("divergence",)),
    Case("policy-entropy", Entropy, rows(WIDTH), POINT, Demand(7, 2.0), "score 6, scaling 1; scores reach 2"),
)  # fmt: skip
