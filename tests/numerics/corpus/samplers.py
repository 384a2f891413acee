"""Samplers: many small steps of a float32 state, whose factors are ratios and differences of numbers near one."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp, rows

__all__ = ["CASES"]

WIDTH, STEPS, LAST = 16, 4, 1000


class Sampler(nn.Module):
    """A network of a state and a time, and steps of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH + 1, 32, WIDTH)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, LAST), 0))

    def guess(self, x: Tensor, time: Tensor) -> Tensor:
        """The net's noise, velocity or score."""
        return self.net(torch.cat([x, time.expand(len(x), 1)], -1))

    def step(self, x: Tensor, guess: Tensor, i: int) -> Tensor:
        raise NotImplementedError

    def time(self, i: int) -> Tensor:
        return torch.tensor(1 - i / STEPS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start = x
        for i in range(STEPS):
            x = self.step(x, self.guess(x, self.time(i)), i)
        return x, x - start


class Implicit(Sampler):
    """DDIM over the last tenth of the noise: what is left of a picture and of noise, by square roots of products."""

    def step(self, x: Tensor, guess: Tensor, i: int) -> Tensor:
        now, then = self.kept[100 - 10 * i], self.kept[90 - 10 * i]
        clean = (x - (1 - now).sqrt() * guess) / now.sqrt()
        return then.sqrt() * clean + (1 - then).sqrt() * guess


class Ancestral(Sampler):
    """DDPM: the posterior's mean, without its noise."""

    def step(self, x: Tensor, guess: Tensor, i: int) -> Tensor:
        now, then = self.kept[100 - 10 * i], self.kept[90 - 10 * i]
        beta = 1 - now / then
        clean = (x - (1 - now).sqrt() * guess) / now.sqrt()
        return then.sqrt() * beta / (1 - now) * clean + (now / then).sqrt() * (1 - then) / (1 - now) * x


class Heun(Sampler):
    """EDM: scales of inputs and outputs by the noise, and a corrected step."""

    def clean(self, x: Tensor, sigma: Tensor) -> Tensor:
        whole = sigma**2 + 0.25
        guess = self.guess(x / whole.sqrt(), sigma.log() / 4)
        return 0.25 / whole * x + sigma * 0.5 / whole.sqrt() * guess

    def slope(self, x: Tensor, clean: Tensor, sigma: Tensor) -> Tensor:
        return (x - clean) / sigma

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start, sigmas = x, 0.5 * 0.85 ** torch.arange(STEPS + 1)
        for now, then in itertools.pairwise(sigmas):
            first = self.slope(x, self.clean(x, now), now)
            moved = x + (then - now) * first
            x = x + (then - now) * (first + self.slope(moved, self.clean(moved, then), then)) / 2
        return x, x - start


class Multistep(Sampler):
    """DPM-Solver++ of the second order: logarithms of signal to noise, and `expm1`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start, kept = x, self.kept[torch.arange(100, 59, -10)]
        alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
        half = alpha.log() - sigma.log()
        before = None
        for i in range(STEPS):
            clean = (x - sigma[i] * self.guess(x, self.time(i))) / alpha[i]
            h = half[i + 1] - half[i]
            mixed = clean if before is None else clean + (h / (half[i] - half[i - 1])) / 2 * (clean - before)
            x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * torch.expm1(-h) * mixed
            before = clean
        return x, x - start


class Guided(Implicit):
    """Classifier-free guidance: eight times a small difference of two guesses."""

    def guess(self, x: Tensor, time: Tensor) -> Tensor:
        time = time.expand(len(x), 1)
        both = torch.cat([torch.cat([x, 0 * time], -1), torch.cat([x, time], -1)])
        free, bound = self.net(both).chunk(2)
        return free + 7.5 * (bound - free)


class NoiseLoss(Sampler):
    """Training: a noisy state of a drawn time, and a loss weighted by signal to noise."""

    def noisy(self, x: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.kept[time][:, None]
        return kept.sqrt() * x + (1 - kept).sqrt() * noise, kept / (1 - kept)

    def weigh(self, guess: Tensor, noise: Tensor, ratio: Tensor) -> Tensor:
        return ((guess - noise).square().mean(-1) * (torch.clamp(ratio, max=5) / ratio)[:, 0]).mean()

    def forward(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        x, ratio = self.noisy(x, noise, time)
        return self.weigh(self.net(torch.cat([x, time[:, None] / LAST], -1)), noise, ratio)


POINT = "samplers"
STEP = ("step",)
WHY = "two layers and a tanh 6, in steps that add up to a tenth"


def _sampler(name: str, build: type[Sampler], islands: tuple[str, ...] = STEP, share: float = 0.1) -> Case:
    return Case(name, build, rows(WIDTH), POINT, Demand(7, share, 1.0), WHY, islands, {"output 1": Demand(7)})


CASES = (
    _sampler("ddim", Implicit),
    _sampler("ddpm", Ancestral),
    _sampler("edm-heun", Heun, ("slope",), share=0.3),
    _sampler("dpm-solver", Multistep, ()),
    _sampler("guidance", Guided, share=0.5),
    Case("noise-loss", NoiseLoss,
         lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH), torch.randint(LAST, (n,))), POINT, Demand(6),
         "two layers and a tanh 6; the loss is exact", ("noisy", "weigh"), sizes=(16, 24)),
)  # fmt: skip
