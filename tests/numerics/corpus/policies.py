"""Reinforcement learning: returns as sums over time, ratios of probabilities, densities of squashed actions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp, rows

__all__ = ["CASES"]

WIDTH, GAMMA, LAMBDA = 16, 0.99, 0.95


class Returns(nn.Module):
    """Values of states along time, and what rewards make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.value = mlp(WIDTH, 32, 1)

    def estimate(self, value: Tensor, reward: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, reward: Tensor) -> Tensor:
        return self.estimate(self.value(x)[..., 0] + 3, reward)


class Advantages(Returns):
    """Generalised advantages, back through time from zeros, and normalised."""

    def estimate(self, value: Tensor, reward: Tensor) -> Tensor:
        last, found = torch.zeros(len(value)), []
        for t in reversed(range(reward.shape[1])):
            delta = reward[:, t] + GAMMA * value[:, t + 1] - value[:, t]
            last = delta + GAMMA * LAMBDA * last
            found.insert(0, last)
        advantage = torch.stack(found, 1)
        return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


class LambdaReturns(Returns):
    """TD(lambda) as Dreamer computes it."""

    def estimate(self, value: Tensor, reward: Tensor) -> Tensor:
        last, found = value[:, -1], []
        for t in reversed(range(reward.shape[1])):
            last = reward[:, t] + GAMMA * ((1 - LAMBDA) * value[:, t + 1] + LAMBDA * last)
            found.append(last)
        return torch.stack(found[::-1], 1)


class DiscountedSum(Returns):
    """Rewards and learned bonuses, discounted by powers and added up by a product."""

    def estimate(self, value: Tensor, reward: Tensor) -> Tensor:
        bonus = reward + 0.1 * value[:, :-1]
        place = torch.arange(bonus.shape[1])
        power = (place[None] - place[:, None]).clamp(min=0)
        return bonus @ (GAMMA**power).triu().T


class OneStep(Returns):
    """The error of a value by the value that follows."""

    def estimate(self, value: Tensor, reward: Tensor) -> Tensor:
        target = (reward + GAMMA * value[:, 1:]).detach()
        return F.smooth_l1_loss(value[:, :-1], target)


class PolicyRatio(nn.Module):
    """PPO: the ratio to an old policy, which is nearly one, clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = mlp(WIDTH, 32, 4)

    def objective(self, logits: Tensor, old: Tensor, action: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        change = logits.log_softmax(-1).gather(-1, action[:, None])[:, 0] - old
        ratio = change.exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -clipped.mean(), ((ratio - 1) - change).mean()

    def forward(self, x: Tensor, old: Tensor, action: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        return self.objective(self.policy(x), old, action, advantage)


class GaussianPolicy(nn.Module):
    """A continuous action's density, and the policy's entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = mlp(WIDTH, 32, 4), nn.Parameter(torch.full((4,), -1.0))

    def density(self, mean: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        policy = torch.distributions.Normal(mean, self.log_std.exp(), validate_args=False)
        return policy.log_prob(action).sum(-1), policy.entropy().sum(-1) * torch.ones_like(mean[:, 0])

    def forward(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return self.density(self.mean(x), action)


class Squashed(nn.Module):
    """SAC: an action through a tanh, whose density loses the logarithm of its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = mlp(WIDTH, 32, 8)

    def slope(self, raw: Tensor) -> Tensor:
        return torch.log(1 - torch.tanh(raw).pow(2) + 1e-6)

    def squash(self, found: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = found.chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        raw = 2 * mean + noise * log_std.exp()
        density = -0.5 * noise.square() - log_std - math.log(2 * math.pi) / 2
        return torch.tanh(raw), (density - self.slope(raw)).sum(-1)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.squash(self.policy(x), noise)


class SquashedStably(Squashed):
    """The same by a softplus."""

    def slope(self, raw: Tensor) -> Tensor:
        return 2 * (math.log(2) - raw - F.softplus(-2 * raw))


class Projected(nn.Module):
    """C51: a distribution of returns moved by a reward, and shared between the atoms beside."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = 21
        self.now, self.next = mlp(WIDTH, 32, 21), mlp(WIDTH, 32, 21)
        self.register_buffer("support", torch.linspace(-5, 5, 21))

    def project(self, logits: Tensor, reward: Tensor) -> Tensor:
        probability = logits.softmax(-1)
        place = ((reward[:, None] + GAMMA * self.support).clamp(-5, 5) + 5) / 0.5
        low, high = place.floor().long(), place.ceil().long()
        alone = (low == high).to(place)
        target = torch.zeros_like(probability)
        target = target.scatter_add(1, low, probability * (high - place + alone))
        return target.scatter_add(1, high, probability * (place - low))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return -(target.detach() * logits.log_softmax(-1)).sum(-1)

    def forward(self, x: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        target = self.project(self.next(x), reward)
        return self.loss(self.now(x), target), target


class Quantiles(nn.Module):
    """Quantile regression of returns: Huber errors of all pairs, weighted by their sign."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.next = mlp(WIDTH, 32, 8), mlp(WIDTH, 32, 8)

    def loss(self, now: Tensor, then: Tensor, reward: Tensor) -> Tensor:
        target = (reward[:, None] + GAMMA * (then + 3)).detach()
        error = target[:, None] - (now + 3)[..., None]
        size = error.abs()
        huber = torch.where(size <= 1, 0.5 * error**2, size - 0.5)
        share = (torch.arange(8) + 0.5) / 8
        return ((share[:, None] - (error.detach() < 0).to(error)).abs() * huber).mean(-1).sum(-1)

    def forward(self, x: Tensor, reward: Tensor) -> Tensor:
        return self.loss(self.now(x), self.next(x), reward)


class TwoHot(nn.Module):
    """DreamerV3: returns by their symmetric logarithm, as an expectation over bins."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 32, 41)
        self.register_buffer("bins", torch.linspace(-10, 10, 41))

    def expect(self, logits: Tensor) -> Tensor:
        mean = (logits.softmax(-1) * self.bins).sum(-1)
        return mean.sign() * (mean.abs().exp() - 1)

    def loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        place = (wanted.sign() * wanted.abs().log1p() + 10) / 0.5
        low = place.floor().clamp(0, 39)
        share = (place - low)[:, None]
        hot = F.one_hot(low.long(), 41) * (1 - share) + F.one_hot(low.long() + 1, 41) * share
        return -(hot * logits.log_softmax(-1)).sum(-1)

    def forward(self, x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = 3 * self.net(x)
        return self.loss(logits, wanted), self.expect(logits)


class Duel(nn.Module):
    """A duelling network: a large value, and advantages less their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.value, self.advantage = mlp(WIDTH, 32), nn.Linear(32, 1), nn.Linear(32, 6)

    def combine(self, value: Tensor, advantage: Tensor) -> Tensor:
        return value + 20 + (advantage - advantage.mean(-1, keepdim=True))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.encode(x))
        found = self.combine(self.value(z), self.advantage(z))
        return found, found - found.amax(-1, keepdim=True)


def _episodes(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, size + 1, WIDTH), torch.randn(4, size)


def _actions(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(size, WIDTH), -1.4 + 0.05 * torch.randn(size), torch.randint(4, (size,)), torch.randn(size)


def _noisy(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, 4)


def _rewarded(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), 2 * torch.randn(size)


POINT = "reinforcement"
ESTIMATE, LONG = ("estimate",), (6, 9)
NET = "two layers and a tanh 7"

CASES = (
    Case("advantages", Advantages, _episodes, POINT, Demand(8, 3.0), f"{NET}, offset 1; a value is three advantages",
         ESTIMATE, sizes=LONG),
    Case("lambda-returns", LambdaReturns, _episodes, POINT, Demand(8), f"{NET}, offset 1", ESTIMATE, sizes=LONG),
    Case("discounted-sum", DiscountedSum, _episodes, POINT, Demand(8), f"{NET}, offset 1; the rest is exact",
         ESTIMATE, sizes=LONG),
    Case("one-step-error", OneStep, _episodes, POINT, Demand(8, 3.0), f"{NET}, offset 1; a value is three errors",
         ESTIMATE, sizes=LONG),
    Case("policy-ratio", PolicyRatio, _actions, POINT, Demand(7, 2.0), f"{NET}; two logarithms are off", ("objective",),
         {"output 1": Demand(7, 8.0)}, sizes=(32, 48)),
    Case("gaussian-policy", GaussianPolicy, _noisy, POINT, Demand(7, 2.0), f"{NET}, squared", ("density",),
         {"output 1": Demand(0)}),
    Case("squashed-action", Squashed, _noisy, POINT, Demand(7, 2.0), f"{NET}, in a logarithm of a slope", ("squash",)),
    Case("squashed-stably", SquashedStably, _noisy, POINT, Demand(7, 2.0), f"{NET}, in a logarithm of a slope",
         ("squash",)),
    Case("projected-returns", Projected, _rewarded, POINT, Demand(7), f"{NET}; shares are exact",
         ("project", "loss")),
    Case("quantile-returns", Quantiles, _rewarded, POINT, Demand(7, 2.0), f"{NET}, squared", ("loss",)),
    Case("two-hot-returns", TwoHot, _rewarded, POINT, Demand(8, 2.0), f"{NET}, scale 1; logits of several",
         ("loss", "expect"), {"output 1": Demand(8, 4.0)}),
    Case("duel", Duel, rows(WIDTH), POINT, Demand(8), f"{NET}, a second head 2, beside twenty", ("combine",),
         {"output 1": Demand(8, 2.0)}),
)  # fmt: skip
