"""Solvers: a state that many small steps add to. The steps may be 16-bit, the state may not."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp, rows

__all__ = ["CASES"]

WIDTH = 8


class Euler(nn.Module):
    """48 explicit steps from a state that is given."""

    steps, size = 48, 1e-3

    def __init__(self) -> None:
        super().__init__()
        self.slope = mlp(WIDTH, 16, WIDTH)

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        start = y
        for _ in range(self.steps):
            y = y + self.size * self.slope(y)
        return y, y - start


class EulerInPlace(Euler):
    """A displacement beside the state, which is added to in place."""

    steps = 12

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        moved = torch.zeros_like(y)
        for _ in range(self.steps):
            moved.add_(self.slope(y + moved), alpha=self.size)
        return y + moved, moved


class EulerFromZeros(Euler):
    """The same, not in place."""

    steps = 12

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        moved = torch.zeros_like(y)
        for _ in range(self.steps):
            moved = moved + self.size * self.slope(y + moved)
        return y + moved, moved


class RungeKutta(Euler):
    """Four stages a step."""

    steps, size = 3, 2e-2

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        start, h = y, self.size
        for _ in range(self.steps):
            a = self.slope(y)
            b = self.slope(y + h / 2 * a)
            c = self.slope(y + h / 2 * b)
            d = self.slope(y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
        return y, y - start


class Leapfrog(nn.Module):
    """A Hamiltonian network: positions and momenta in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.force = mlp(WIDTH, 16, WIDTH)

    def forward(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(6):
            p = p + 5e-3 * self.force(q)
            q = q + 1e-2 * p
            p = p + 5e-3 * self.force(q)
        return q, p


class Clock(nn.Module):
    """Steps whose slope depends on the time, which is itself added up."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.out = mlp(WIDTH + 1, 16, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, y: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(10):
            wave = torch.sin(time * 10)
            y = y + 1e-2 * self.slope(torch.cat([y, wave], -1))
            time = time + 0.01
        return self.out(y), time


class Sampler(nn.Module):
    """A deterministic diffusion sampler: most of each step keeps the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = mlp(WIDTH, 16, WIDTH)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 2e-3, 9), 0).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(8):
            here, then = self.kept[i], self.kept[i + 1]
            noise = self.noise(x)
            clean = (x - (1 - here).sqrt() * noise) / here.sqrt()
            x = then.sqrt() * clean + (1 - then).sqrt() * noise
        return x


class SlowRecurrence(nn.Module):
    """A linear recurrence that forgets a thousandth a step."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        given = self.into(x)
        for i in range(16):
            state = 0.999 * state + 1e-3 * given[:, i]
        return self.out(state), state


class ShrinkageSteps(nn.Module):
    """Unrolled iterative shrinkage: small steps towards a sparse code."""

    def __init__(self) -> None:
        super().__init__()
        self.dictionary = nn.Parameter(torch.randn(16, WIDTH) / 4)

    def forward(self, signal: Tensor, code: Tensor) -> Tensor:
        for _ in range(8):
            residual = code @ self.dictionary - signal
            code = code - 0.01 * residual @ self.dictionary.T
            code = code.sign() * (code.abs() - 1e-3).relu()
        return code


class InnerLearning(nn.Module):
    """Gradient steps on weights inside the model, as in meta learning: the weights take small steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight
        for _ in range(5):
            error = x @ weight - y
            weight = weight - 1e-2 * (x.T @ error) / x.shape[0]
        return x @ weight, weight - self.weight


class InnerMomentum(nn.Module):
    """Unrolled Adam: moments that start as zeros and move by a thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def moments(self, slope: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope * slope

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start, first, second = x, torch.zeros_like(x), torch.zeros_like(x)
        for step in range(1, 7):
            first, second = self.moments(self.map(x), first, second)
            x = x - 1e-3 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 0.5)
        return x, x - start


class Damped(nn.Module):
    """A pull towards the output of a network; the pull is a constant of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.target = mlp(WIDTH, 16, WIDTH)
        self.register_buffer("rate", torch.tensor(2e-3))

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        start = y
        for _ in range(10):
            y = torch.lerp(y, self.target(y).to(y.dtype), self.rate)
        return y, y - start


class PathOfSteps(nn.Module):
    """Positions as the running sum of small predicted steps, from a far origin."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        path = origin[:, None] + torch.cumsum(self.step(x) * 1e-2, 1)
        return path, path - origin[:, None]


class Sinkhorn(nn.Module):
    """Balanced assignment in the logarithmic domain, at a low temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.tanh(self.left(x) @ self.right(y).T / math.sqrt(32)) / 0.1
        for _ in range(6):
            scores = scores - scores.logsumexp(1, keepdim=True)
            scores = scores - scores.logsumexp(0, keepdim=True)
        return scores.exp()


class LeakyNeuron(nn.Module):
    """Membranes that charge slowly, and their rate through a steep sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.current = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, voltage: Tensor) -> tuple[Tensor, Tensor]:
        given = self.current(x)
        rates: list[Tensor] = []
        for i in range(12):
            voltage = voltage + (given[:, i] - voltage) / 200
            rates.append(torch.sigmoid((voltage - 1) * 8))
        return torch.stack(rates, 1), voltage


class Refined(nn.Module):
    """Iterative refinement of boxes in pixels: small corrections to large coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ModuleList(mlp(WIDTH, 16, 4) for _ in range(4))

    def forward(self, x: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        start = boxes
        for shift in self.shift:
            boxes = boxes + shift(x).tanh() * 0.5
        return boxes, boxes - start


def _pair(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def _clocked(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.full((size, 1), 40.0)


def _recurrent(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 16, WIDTH), torch.randn(size, WIDTH) * 3


def _coded(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, 16)


def _placed(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, size, WIDTH), torch.tensor([[1000.0, -700.0], [300.0, 90.0]])


def _boxed(size: int) -> tuple[Tensor, Tensor]:
    corner = torch.rand(size, 2) * 600
    return torch.randn(size, WIDTH), torch.cat([corner, corner + 50], -1)


MOVED = "the way gone is a sum of slopes of 6 roundings each (linear 3, tanh 1, linear 2)"


def _steps(name: str, build: type[nn.Module], share: float, **options: object) -> Case:
    """A state of norm about one, which moves by ``share``; the second result is the way gone."""
    return Case(name, build, rows(WIDTH), "provenance", Demand(6, share, 1.0), f"{MOVED}, {share:.0%} of the state",
                tensors={"output 1": Demand(6)}, **options)  # fmt: skip


CASES = (
    _steps("euler-48", Euler, 0.05),
    _steps("euler-in-place", EulerInPlace, 0.02),
    _steps("euler-from-zeros", EulerFromZeros, 0.02),
    _steps("runge-kutta", RungeKutta, 0.06),
    Case("leapfrog", Leapfrog, _pair, "provenance", Demand(6, 0.06, 1.0), f"{MOVED}, 6 % of momenta; positions less"),
    Case("clocked-steps", Clock, _clocked, "provenance", Demand(6),
         "linear 3 after steps that add 10 % of 6; the clock is exact",         tensors={"output 1": Demand(0)}),
    Case("diffusion-sampler", Sampler, rows(WIDTH), "provenance", Demand(6, 0.1, 1.0),
         "noise of 6 roundings is at most 10 % of the sample"),
    Case("slow-recurrence", SlowRecurrence, _recurrent, "provenance", Demand(3), "linear 3; states add 1.6 % of that",
         tensors={"output 1": Demand(3, 0.016)}),
    Case("iterative-shrinkage", ShrinkageSteps, _coded, "provenance", Demand(7, 0.08, 1.0),
         "a step's two products have 3 and 3 roundings, its scaling 1; eight steps of 1 %"),
    Case("inner-learning", InnerLearning, _pair, "provenance", Demand(7, 2.0),
         "error 4, its product 3; error cancels to about half its operands"),
    Case("inner-adam", InnerMomentum, rows(WIDTH), "provenance", Demand(3, 0.01, 1.0),
         "linear 3; the state moves by 0.6 %", ("moments",), tensors={"output 1": Demand(3)}),
    _steps("damped-pull", Damped, 0.02),
    Case("path-of-steps", PathOfSteps, _placed, "provenance", Demand(4, 1e-3, 1.0),
         "linear 3, scaling 1, of steps that are a thousandth of the origin", tensors={"output 1": Demand(4)},
         sizes=(16, 24)),
    Case("sinkhorn", Sinkhorn, _pair, "sums", Demand(8, 5.0),
         "scores: linear 3, product 2, tanh 1, division 1, exponential 1; of size 5, in an exponent"),
    Case("leaky-neuron", LeakyNeuron, lambda n: (torch.randn(n, 12, WIDTH), 1 + torch.rand(n, WIDTH)), "provenance",
         Demand(3, 0.06, 1.0), "linear 3, of 6 % of the voltage; the sigmoid's slope is below its value",
         tensors={"output 0": Demand(4)}),
    Case("refined-boxes", Refined, _boxed, "provenance", Demand(7, 0.01, 1.0),
         "shifts of at most 2 pixels in 300, of 7 roundings",
         tensors={"output 1": Demand(7)}),
)  # fmt: skip
