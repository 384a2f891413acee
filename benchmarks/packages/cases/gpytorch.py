"""gpytorch: exact and variational Gaussian processes, and a kernel on learned features."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, features: nn.Module | None = None) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.features = nn.Identity() if features is None else features
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


class Variational(gpytorch.models.ApproximateGP):
    def __init__(self, points: Tensor) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(points.size(0))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


class Loss(nn.Module):
    """The negative marginal likelihood, as part of what is converted."""

    def __init__(self, model: Any, likelihood: Any) -> None:
        super().__init__()
        self.model = model
        if isinstance(model, Exact):
            self.likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        else:
            self.likelihood = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.likelihood(self.model(x), y)


def _data() -> tuple[Tensor, Tensor]:
    x = torch.linspace(0, 1, 20).unsqueeze(-1)
    return x, torch.sin(6 * x).squeeze(-1) + 0.1 * torch.randn(20)


def _exact() -> nn.Module:
    model = Exact(*_data())
    return Loss(model, model.likelihood).train()


def _deep() -> nn.Module:
    model = Exact(*_data(), nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2)))
    return Loss(model, model.likelihood).train()


def _variational() -> nn.Module:
    return Loss(Variational(torch.linspace(0, 1, 6).unsqueeze(-1)), gpytorch.likelihoods.GaussianLikelihood()).train()


def _inputs() -> Given:
    """An exact process is trained on its own data only."""
    torch.manual_seed(0)
    return _data(), {}


CASES = (
    Case("exact process", _exact, _inputs, lambda loss, _: loss),
    Case("kernel on learned features", _deep, _inputs, lambda loss, _: loss),
    Case("variational process", _variational, _inputs, lambda loss, _: loss),
)
