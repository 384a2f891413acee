"""Gaussian processes on learned features: kernel matrices, their factors, and variances as small differences."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import rows

__all__ = ["CASES"]

WIDTH, SMALL = 8, 3


class Kernel(nn.Module):
    """A kernel of features of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, SMALL)
        self.log_length, self.log_noise = nn.Parameter(torch.zeros(SMALL)), nn.Parameter(torch.tensor(-2.0))
        self.register_buffer("inducing", torch.randn(6, SMALL))

    def apart(self, a: Tensor, b: Tensor) -> Tensor:
        """Squared distances, by the expanded square."""
        a, b = a / self.log_length.exp(), b / self.log_length.exp()
        return (a.square().sum(-1)[:, None] + b.square().sum(-1)[None] - 2 * a @ b.T).clamp(min=0)

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-self.apart(a, b) / 2)

    def noisy(self, a: Tensor) -> Tensor:
        return self.kernel(a, a) + self.log_noise.exp() * torch.eye(len(a))

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fit(self.encode(x), y)


class MarginalLikelihood(Kernel):
    """The exact log marginal likelihood."""

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(self.noisy(z))
        weights = torch.cholesky_solve(y[:, None], factor)[:, 0]
        return -0.5 * y @ weights - factor.diagonal().log().sum() - len(y) / 2 * math.log(2 * math.pi)


class BySolve(Kernel):
    """The same by a solve and a determinant."""

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        kernel = self.noisy(z)
        return -(y * torch.linalg.solve(kernel, y)).sum() / 2 - torch.logdet(kernel) / 2


class Predictive(Kernel):
    """The variance at new places: the kernel's diagonal less what is known."""

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        known, new = z[::2], z[1::2]
        factor = torch.linalg.cholesky(self.noisy(known))
        left = torch.linalg.solve_triangular(factor, self.kernel(known, new), upper=False)
        return torch.ones(len(new)) - left.square().sum(0)


class ByProduct(Kernel):
    """The same by products with an inverse."""

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        known, new = z[::2], z[1::2]
        cross = self.kernel(new, known)
        return (self.kernel(new, new) - cross @ torch.linalg.inv(self.noisy(known)) @ cross.T).diagonal()


class Matern(MarginalLikelihood):
    """Matérn 5/2, by distances."""

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        r = 5**0.5 * (self.apart(a, b) + 1e-4).sqrt()
        return (1 + r + r.square() / 3) * torch.exp(-r)


class Periodic(MarginalLikelihood):
    """Sines of differences, in each dimension."""

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        turns = torch.sin(math.pi * (a[:, None] - b[None]) / 3)
        return torch.exp(-2 * (turns / self.log_length.exp()).square().sum(-1))


class Polynomial(MarginalLikelihood):
    """An additive one: a linear kernel and its square."""

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        dot = a @ b.T
        return dot + 0.2 * (1 + dot) ** 2


class Collapsed(Kernel):
    """Titsias' bound, by Woodbury's formula."""

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        noise = self.log_noise.exp()
        factor = torch.linalg.cholesky(self.kernel(self.inducing, self.inducing) + 1e-3 * torch.eye(6))
        a = torch.linalg.solve_triangular(factor, self.kernel(self.inducing, z), upper=False) / noise.sqrt()
        second = torch.linalg.cholesky(torch.eye(6) + a @ a.T)
        c = torch.linalg.solve_triangular(second, (a @ y)[:, None], upper=False) / noise.sqrt()
        fit = (y.square().sum() / noise - c.square().sum()) / 2 + len(y) / 2 * noise.log()
        return -fit - second.diagonal().log().sum() - (len(y) / noise - a.square().sum()) / 2


class Variational(Kernel):
    """A stochastic variational process: a whitened posterior, its mean and its variance."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.root = nn.Parameter(torch.randn(6)), nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(self.kernel(self.inducing, self.inducing) + 1e-3 * torch.eye(6))
        a = torch.linalg.solve_triangular(factor, self.kernel(self.inducing, z), upper=False)
        mean, root = a.T @ self.mean, self.root.tril()
        variance = 1 - a.square().sum(0) + (root.T @ a).square().sum(0) + 1e-3
        likelihood = -0.5 * ((y - mean).square() + variance) / self.log_noise.exp() - 0.5 * self.log_noise
        divergence = (root.square().sum() + self.mean.square().sum() - 6) / 2 - root.diagonal().abs().log().sum()
        return likelihood.sum() - divergence


class RandomFeatures(nn.Module):
    """Spectral normalised processes: cosines, and a precision matrix of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.out = nn.Linear(WIDTH, SMALL), nn.Linear(24, 1)
        self.register_buffer("waves", torch.randn(SMALL, 24))
        self.register_buffer("phase", 2 * math.pi * torch.rand(24))

    def doubt(self, z: Tensor) -> tuple[Tensor, Tensor]:
        wave = (2 / 24) ** 0.5 * torch.cos(z @ self.waves + self.phase)
        precision = torch.eye(24) + wave.T @ wave
        return wave, (wave @ torch.linalg.inv(precision) * wave).sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        wave, variance = self.doubt(self.encode(x))
        return self.out(wave)[:, 0] / torch.sqrt(1 + math.pi / 8 * variance)


class Discrepancy(nn.Module):
    """Maximum mean discrepancy: the mean kernels of two samples less twice that between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, SMALL)

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        apart = (a[:, None] - b[None]).square().sum(-1)
        return torch.stack([torch.exp(-apart / (2 * width)) for width in (1.0, 4.0)]).sum(0)

    def discrepancy(self, a: Tensor, b: Tensor) -> Tensor:
        return self.kernel(a, a).mean() + self.kernel(b, b).mean() - 2 * self.kernel(a, b).mean()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.discrepancy(self.encode(a), self.encode(b))


def _data(size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, WIDTH)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(size)


POINT = "gaussian processes"


def _fitted(name: str, build: type[Kernel], condition: float = 8.0) -> Case:
    why = f"features 3; an inverse by a noise of a seventh, which makes them {condition:g} times as far off"
    return Case(name, build, _data, POINT, Demand(3, condition), why, ("fit",), sizes=(16, 24))


CASES = (
    _fitted("marginal-likelihood", MarginalLikelihood),
    _fitted("likelihood-by-solve", BySolve),
    _fitted("predictive-variance", Predictive),
    _fitted("variance-by-inverse", ByProduct),
    _fitted("matern", Matern),
    _fitted("periodic-kernel", Periodic),
    _fitted("polynomial-kernel", Polynomial),
    _fitted("collapsed-bound", Collapsed),
    _fitted("variational-process", Variational),
    Case("random-features", RandomFeatures, rows(WIDTH), POINT, Demand(6, 2.0), "features 3, out 3; a cosine of some",
         ("doubt",), sizes=(16, 24)),
    Case("discrepancy", Discrepancy, lambda n: (torch.randn(n, WIDTH), 0.5 + torch.randn(n, WIDTH)), POINT,
         Demand(3, 4.0), "features 3; a quarter of the kernels is left", ("discrepancy",), sizes=(16, 24)),
)  # fmt: skip
