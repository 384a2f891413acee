"""Positions: whole numbers that become angles, distances and biases. Steps of one must stay steps of one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp, sequences, tokens

__all__ = ["CASES"]

WIDTH = 16
LONG = (300, 520)  # beyond 256, above which bfloat16 does not tell whole numbers apart


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Rotary(nn.Module):
    """Rotary positions by a broadcast product, as in most code."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH))

    def angles(self, length: int, x: Tensor) -> Tensor:
        return torch.arange(length, device=x.device).float()[:, None] * self.frequencies

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles(x.shape[1], x)
        return _turn(self.query(x), angles.cos(), angles.sin())


class RotaryOuter(Rotary):
    def angles(self, length: int, x: Tensor) -> Tensor:
        return torch.outer(torch.arange(length, device=x.device).float(), self.frequencies)


class RotaryEinsum(Rotary):
    def angles(self, length: int, x: Tensor) -> Tensor:
        return torch.einsum("i,j->ij", torch.arange(length, device=x.device).float(), self.frequencies)


class RotaryMatmul(Rotary):
    def angles(self, length: int, x: Tensor) -> Tensor:
        places = torch.arange(length, device=x.device).float()
        return (self.frequencies[:, None] @ places[None, :]).transpose(0, 1)


class RotaryComplex(Rotary):
    """Pairs as complex numbers, turned by unit numbers."""

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).to(x.dtype), self.frequencies)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(self.query(x).to(x.dtype))


class RotaryStretched(Rotary):
    """Positions interpolated to a longer context, given as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        angles = (places * 0.25)[..., None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        query, key = _turn(self.query(x), cos, sin), _turn(self.key(x), cos, sin)
        return (query @ key.transpose(-1, -2) / math.sqrt(WIDTH)).softmax(-1)


class Sinusoids(nn.Module):
    """Sinusoidal positions added to embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device).unsqueeze(1)
        rate = torch.exp(torch.arange(0, WIDTH, 2, device=ids.device) * (-math.log(10000.0) / WIDTH))
        waves = torch.stack([torch.sin(place * rate), torch.cos(place * rate)], -1).flatten(-2)
        return self.out(self.embed(ids) + waves)


class Timesteps(nn.Module):
    """The time embedding of a diffusion model; times run to 1,000."""

    def __init__(self) -> None:
        super().__init__()
        self.after = mlp(WIDTH, 32, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rate = torch.exp(-math.log(10000.0) * torch.arange(WIDTH // 2, device=x.device) / (WIDTH // 2))
        angles = time[:, None] * rate[None]
        return x + self.after(torch.cat([angles.cos(), angles.sin()], -1))


class FourierFeatures(nn.Module):
    """Random Fourier features of points in the plane, by a product over two."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(2, WIDTH) * 10)
        self.out = mlp(2 * WIDTH, 32, 3)

    def phase(self, points: Tensor) -> Tensor:
        return 2 * math.pi * points @ self.directions

    def forward(self, points: Tensor) -> Tensor:
        phase = self.phase(points)
        return self.out(torch.cat([phase.sin(), phase.cos()], -1))


class Octaves(nn.Module):
    """The encoding of NeRF: sines of ten octaves of each coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("octaves", 2.0 ** torch.arange(10))
        self.out = mlp(63, 32, 4)

    def forward(self, points: Tensor) -> Tensor:
        phase = (points[..., None] * self.octaves * math.pi).flatten(-2)
        return self.out(torch.cat([points, phase.sin(), phase.cos()], -1))


class Buckets(nn.Module):
    """Relative positions in logarithmic buckets, as in T5, and the bias they look up."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.bias = nn.Linear(WIDTH, WIDTH), nn.Embedding(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(x.shape[1], device=x.device)
        far = (place[None] - place[:, None]).abs()
        steps = 8 + (torch.log(far.float().clamp_min(1) / 8) / math.log(128 / 8) * 8).long()
        bucket = torch.where(far < 8, far, steps.clamp_max(31))
        query = self.query(x)
        return query @ query.transpose(-1, -2) / 4 + self.bias(bucket).squeeze(-1), bucket


class Slopes(nn.Module):
    """ALiBi: a penalty that grows with distance, added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def penalty(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).float()
        return -(2.0**-7) * (place[:, None] - place[None]).abs()

    def scores(self, query: Tensor, key: Tensor, penalty: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) / math.sqrt(WIDTH) + penalty

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.query(x), self.key(x), self.penalty(x)).softmax(-1)


class SlopesInProduct(Slopes):
    """The same as BLOOM writes it: the penalty, of whole positions, is the additive operand of baddbmm."""

    def penalty(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).float()
        return (2.0**-7 * place).expand(x.shape[0], 1, -1)

    def scores(self, query: Tensor, key: Tensor, penalty: Tensor) -> Tensor:
        return torch.baddbmm(penalty * 16, query, key.transpose(-1, -2), alpha=1 / math.sqrt(WIDTH))


class Window(Slopes):
    """A Gaussian window of attention: squares of distances run to 10^5."""

    def penalty(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).float()
        return -((place[:, None] - place[None]) ** 2) / (2 * 40.0**2)


class LogDistance(Slopes):
    """A bias by the logarithm of the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(-0.5))

    def penalty(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        return self.weight * torch.log1p((place[:, None] - place[None]).abs().float())


class Decay(nn.Module):
    """Positions that also decay, as in XPos: powers of distances from the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("base", (torch.arange(WIDTH) + 6.4) / 22.4)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).float()
        return self.query(x) * self.base ** ((place - x.shape[1] // 2)[:, None] / 512)


class MaskPositions(nn.Module):
    """DETR's positions of an image: running counts of a mask, scaled to a full turn."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, WIDTH)

    def forward(self, mask: Tensor) -> Tensor:
        count = mask.cumsum(1, dtype=torch.float32)
        turn = count / (count[:, -1:] + 1e-6) * 2 * math.pi * 32
        angles = turn[..., None] / 20 ** (torch.arange(16, device=mask.device) / 16)
        return self.out(torch.cat([angles.sin(), angles.cos()], -1))


class Hours(nn.Module):
    """Time2Vec: learned waves over the hours of a year."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.shift = nn.Parameter(torch.rand(8) * 0.5), nn.Parameter(torch.rand(8))
        self.out = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, hours: Tensor) -> Tensor:
        return self.out(torch.cat([x, torch.sin(hours * self.rate + self.shift)], -1))


class Learned(nn.Module):
    """Learned positions, looked up at shifted whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(600, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.cumsum(torch.ones_like(x[..., 0]), 1) - 1
        return self.out(x + self.table(place.long()))


class LastOf(nn.Module):
    """The last true place of each row, by a maximum over counted places: sequence classification."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(ids.shape[1], device=ids.device).float()
        last = ((ids != 0).float() * place).argmax(-1)
        logits = self.out(self.embed(ids))
        return logits[torch.arange(ids.shape[0], device=ids.device), last], last


class Coordinates(nn.Module):
    """CoordConv: channels that hold where each pixel is, here in pixels from the centre."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        across = torch.arange(x.shape[-1], device=x.device) - (x.shape[-1] - 1) / 2
        radius = (across**2).add(0.25).sqrt().expand(x.shape[0], 1, x.shape[2], -1)
        return F.gelu(self.conv(torch.cat([x, radius / x.shape[-1]], 1))), radius


def _placed(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, size, WIDTH), torch.arange(size).float().expand(2, -1)


def _timed(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randint(0, 1000, (size,)).float()


def _hours(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(0, 8760, (size, 1)).float()


ROTATED = Demand(6)
ROTATED_WHY = "linear 3, cosine or sine 1, product 1, difference 1; the angles are exact"
SCORES = Demand(7, 2.0)
SCORES_WHY = "linear 3, scores 2, scaling 1, softmax 1; softmax makes the absolute error of scores near 2 relative"
WAVES = "the waves are rounded 1, then layers of 2 roundings each; the angles are exact"

CASES = (
    Case("rotary", Rotary, sequences(WIDTH), "whole numbers", ROTATED, ROTATED_WHY, sizes=LONG),
    Case("rotary-outer", RotaryOuter, sequences(WIDTH), "shape", ROTATED, ROTATED_WHY, ("angles",), sizes=LONG),
    Case("rotary-einsum", RotaryEinsum, sequences(WIDTH), "shape", ROTATED, ROTATED_WHY, ("angles",), sizes=LONG),
    Case("rotary-matmul", RotaryMatmul, sequences(WIDTH), "shape", ROTATED, ROTATED_WHY, ("angles",), sizes=LONG),
    Case("rotary-complex", RotaryComplex, sequences(WIDTH), "demand", ROTATED, ROTATED_WHY, sizes=LONG),
    Case("rotary-stretched", RotaryStretched, _placed, "provenance", Demand(8, 2.0), SCORES_WHY, sizes=LONG),
    Case("sinusoidal-positions", Sinusoids, tokens(50), "whole numbers", Demand(4), WAVES, sizes=LONG),
    Case("diffusion-timesteps", Timesteps, _timed, "provenance", Demand(6), WAVES),
    Case("fourier-features", FourierFeatures, lambda n: torch.rand(n, 2), "shape", Demand(6), WAVES, ("phase",)),
    Case("nerf-octaves", Octaves, lambda n: torch.rand(n, 3) * 2 - 1, "demand", Demand(6), WAVES),
    Case("t5-buckets", Buckets, sequences(WIDTH), "demand", Demand(7), SCORES_WHY, sizes=(40, 72)),
    Case("alibi", Slopes, sequences(WIDTH), "whole numbers", SCORES, SCORES_WHY, sizes=LONG),
    Case("alibi-baddbmm", SlopesInProduct, sequences(WIDTH), "whole numbers", SCORES, SCORES_WHY, ("scores",),
         sizes=LONG),
    Case("gaussian-window", Window, sequences(WIDTH), "whole numbers", SCORES, SCORES_WHY, sizes=LONG),
    Case("log-distance-bias", LogDistance, sequences(WIDTH), "demand", SCORES, SCORES_WHY, sizes=LONG),
    Case("xpos-decay", Decay, sequences(WIDTH), "whole numbers", Demand(5), "linear 3, decay 1, product 1", sizes=LONG),
    Case("detr-mask-positions", MaskPositions, lambda n: torch.rand(2, n) < 0.9, "whole numbers", Demand(3),
         "linear 3; counts and angles are exact", sizes=LONG),
    Case("hours-of-a-year", Hours, _hours, "provenance", Demand(3), "linear 3; the phases are exact"),
    Case("places-by-cumsum", Learned, sequences(WIDTH), "whole numbers", Demand(3), "linear 3; places are exact",
         sizes=LONG),
    Case("last-place", LastOf, tokens(50), "whole numbers", Demand(3), "linear 3; places are exact", sizes=LONG),
    Case("pixel-radius", Coordinates, lambda n: torch.randn(2, 3, 4, n), "whole numbers", Demand(4),
         "convolution 3, gelu 1; the radius is exact", sizes=(300, 600), tensors={"output 1": Demand(0)}),
)  # fmt: skip
