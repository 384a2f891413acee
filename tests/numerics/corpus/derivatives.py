"""Gradients: second ones, those through masks and clamps, and small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand, weighted_sum
from tests.numerics.corpus.parts import mean_square, mlp, rows

__all__ = ["CASES"]

WIDTH = 16


def gradient_penalty(outputs: Any, args: tuple[Any, ...]) -> Tensor:
    """The usual penalty of a critic: its gradient by its input, one number a row, has a norm of one."""
    (slope,) = torch.autograd.grad(outputs.float().sum(), args[0], create_graph=True)
    return ((slope.float().pow(2).sum(-1) + 1e-6).sqrt() - 1).pow(2).mean() + 1e-2 * outputs.float().sum()


def forces(outputs: Any, args: tuple[Any, ...]) -> Tensor:
    """Forces are slopes of an energy; the loss is theirs."""
    (force,) = torch.autograd.grad(outputs.float().sum(), args[0], create_graph=True)
    return weighted_sum(force.float(), ())


class Critic(nn.Module):
    """A critic with a gradient penalty, which is taken outside."""

    def __init__(self) -> None:
        super().__init__()
        self.score = mlp(WIDTH, 32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x)


class SmoothCritic(Critic):
    """The same with softplus and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Softplus(), nn.Linear(32, 1))


class Potential(nn.Module):
    """The energy of atoms by their distances: forces are its slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = mlp(8, 16, 1)

    def basis(self, places: Tensor) -> Tensor:
        apart = (places[:, None] - places[None]).pow(2).sum(-1).add(1e-6).sqrt()
        return torch.exp(-((apart[..., None] - torch.linspace(0.5, 4, 8, device=places.device)) ** 2))

    def forward(self, places: Tensor) -> Tensor:
        return self.pair(self.basis(places)).sum((1, 2))


class Field(nn.Module):
    """A signed distance whose slope has a length of one (eikonal): sines inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(3, 32), nn.Linear(32, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.out(torch.sin(3 * self.first(points)))


class HandSlope(nn.Module):
    """A network and its slope, written out by hand: a tangent beside each value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        slope = (1 - hidden * hidden) * F.linear(direction, self.first.weight)
        return self.second(hidden), F.linear(slope, self.second.weight)


class SafeRoot(nn.Module):
    """A root through where, with the safe operand inside: no NaN in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.root(self.encode(x), keep)

    def root(self, z: Tensor, keep: Tensor) -> Tensor:
        z = z**2 * 1e-4
        return torch.where(keep, torch.sqrt(torch.where(keep, z, torch.ones_like(z)) + 1e-8), torch.zeros_like(z)) * 100


class Clipped(nn.Module):
    """PPO: a ratio near one, clipped, against advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(WIDTH, 4)

    def ratio(self, score: Tensor, action: Tensor, before: Tensor) -> Tensor:
        log_p = score.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        return torch.exp(log_p - before)

    def forward(self, x: Tensor, action: Tensor, before: Tensor, gain: Tensor) -> Tensor:
        ratio = self.ratio(0.1 * self.policy(x), action, before)
        return -torch.minimum(ratio * gain, ratio.clamp(0.5, 2.0) * gain).mean()


class SmallGradients(nn.Module):
    """A branch whose gradients are a millionth of the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = mlp(WIDTH, 32, WIDTH), mlp(WIDTH, 32, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        main, side = self.main(x), self.side(x)
        return main, self.fade(side)

    def fade(self, side: Tensor) -> Tensor:
        return side * 1e-6


class SkippedGradients(nn.Module):
    """Stop-gradients: a target that is a copy, a straight-through sign, a part without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        hard = sign + z.tanh() - z.tanh().detach()
        with torch.no_grad():
            still = self.out(x)
        return self.out(hard), still + z.mean()


class LongMean(nn.Module):
    """A mean over many rows: each row's gradient is small."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = mlp(WIDTH, 32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).mean(0)


class BroadBias(nn.Module):
    """A bias and a scale that are shared by thousands of rows: their gradients are long sums."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.full((1, WIDTH), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.encode(x)).tanh() * self.scale + self.bias


class SharedNorm(nn.Module):
    """A norm between two layers: its weight and bias gather the gradients of thousands of rows."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.before(x))) + 0.5


class FrozenFirst(nn.Module):
    """A frozen layer below, and an adapter of low rank that starts near zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.normal_(self.up.weight, std=1e-4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        change = self.up(self.down(x)) * 2.0
        return self.base(x) + change, change


def _wanting(width: int) -> Any:
    return lambda size: torch.randn(size, width, requires_grad=True)


def _kept(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.rand(size, WIDTH) < 0.5


def _played(size: int) -> tuple[Tensor, ...]:
    before = torch.full((size,), 0.25).log()
    return torch.randn(size, WIDTH), torch.randint(4, (size,)), before, torch.randn(size)


POINT = "gradients"
NORMED = "before 3, norm 1, after 2, sum 1"


def _norm(name: str, norm: Callable[[], nn.Module]) -> Case:
    return Case(name, lambda: SharedNorm(norm), rows(WIDTH), "gradients", Demand(7), NORMED, ("norm",),
                sizes=(3000, 4000), loss=mean_square)  # fmt: skip


TWICE = "a slope runs through all layers again"
CASES = (
    Case("gradient-penalty", Critic, _wanting(WIDTH), POINT, Demand(8, 1.0, 2.0), f"score 3 + 1 + 2 + 1 + 2; {TWICE}",
         loss=gradient_penalty),
    Case("gradient-penalty-norm", SmoothCritic, _wanting(WIDTH), POINT, Demand(7, 1.0, 3.0),
         f"score 3, norm 1, softplus 1, out 2; {TWICE}, and divides by a spread", loss=gradient_penalty),
    Case("forces", Potential, _wanting(3), POINT, Demand(6, 1.0, 4.0),
         f"pair 3, tanh 1, out 2; {TWICE}, and the basis has slopes of two", ("basis",), loss=forces),
    Case("eikonal", Field, _wanting(3), POINT, Demand(6, 1.5, 3.0),
         f"first 3, times 3 in a phase, sine 1, out 2; {TWICE}",
         loss=gradient_penalty),
    Case("tangent-by-hand", HandSlope, lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)), POINT, Demand(8, 1.5),
         "first 3, tanh 1, square 1, product 1, second 2"),
    Case("safe-root", SafeRoot, _kept, POINT, Demand(4), "encode 3; roots are exact", ("root",)),
    Case("clipped-ratio", Clipped, _played, POINT, Demand(4, 2.0), "policy 3, scaling 1; gains of either sign cancel"),
    Case("small-gradients", SmallGradients, rows(WIDTH), POINT, Demand(7), "layers 3 + 1 + 2, fading 1", ("fade",)),
    Case("stopped-gradients", SkippedGradients, lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH).sign()), POINT,
         Demand(6), "encode 3, tanh 1, out 2"),
    Case("long-mean", LongMean, rows(WIDTH), POINT, Demand(6), "layers 3 + 1 + 2; the mean is exact",
         sizes=(3000, 4000)),
    Case("broad-bias", BroadBias, rows(WIDTH), POINT, Demand(7), "encode 3, norm 1, tanh 1, scale 1, bias 1", ("norm",),
         sizes=(3000, 4000), loss=mean_square),
    _norm("layer-norm-gradients", lambda: nn.LayerNorm(WIDTH)),
    _norm("rms-norm-gradients", lambda: nn.RMSNorm(WIDTH, eps=1e-6)),
    _norm("group-norm-gradients", lambda: nn.GroupNorm(4, WIDTH)),
    _norm("batch-norm-gradients", lambda: nn.BatchNorm1d(WIDTH)),
    Case("low-rank-adapter", FrozenFirst, rows(WIDTH), POINT, Demand(6), "down 3, up 2, scaling 1"),
)  # fmt: skip
