"""torchdiffeq: networks inside of solvers, whose steps depend on values, with gradients by the adjoint equation."""

from __future__ import annotations

from typing import Any

import torch
import torchdiffeq
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * (1 + t)


class Flow(nn.Module):
    def __init__(self, solve: Any, **options: Any) -> None:
        super().__init__()
        self.first, self.field, self.last = nn.Linear(6, 4), Field(), nn.Linear(4, 2)
        self.solve, self.options = solve, options

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self.last(self.solve(self.field, self.first(x), times, **self.options)[-1])


def _inputs() -> Given:
    return (torch.randn(16, 6), torch.linspace(0, 1, 5)), {}


def _case(name: str, solve: Any, **options: Any) -> Case:
    return Case(name, lambda: Flow(solve, **options).train(), _inputs)


CASES = (
    _case("fixed steps", torchdiffeq.odeint, method="rk4"),
    _case("adaptive steps", torchdiffeq.odeint, method="dopri5", rtol=1e-3, atol=1e-4),
    _case("adaptive steps, adjoint", torchdiffeq.odeint_adjoint, method="dopri5", rtol=1e-3, atol=1e-4),
)
