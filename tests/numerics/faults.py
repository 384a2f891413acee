"""Faults: what 16 bits do not suit, each with the op list that lets it into them and the node that is to be named.

Each function takes normally distributed values of shape (4, 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Function

__all__ = ["ERRORS", "OVERFLOWS", "Fault", "Inside", "refused"]


@dataclass(frozen=True)
class Fault:
    """A function, the list that plants it, and the node that is at fault."""

    function: Callable[[Tensor], Tensor]
    node: str
    listed: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.function.__name__


class Inside(nn.Module):
    """A fault inside a module, after a layer."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.inner = Function(fault)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x)) * 1.0


@torch.library.custom_op("faults::exact", mutates_args=())
def _exact(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError("exact takes float32 alone")
    return x.sin()


@torch.library.custom_op("faults::coarse", mutates_args=())
def _coarse(x: Tensor) -> Tensor:
    return x.sin() if x.dtype == torch.float32 else (x.sin() * 16).round() / 16


_exact.register_fake(lambda x: torch.empty_like(x))
_coarse.register_fake(lambda x: torch.empty_like(x))
exact: Callable[[Tensor], Tensor] = torch.ops.faults.exact
coarse: Callable[[Tensor], Tensor] = torch.ops.faults.coarse


def refused(x: Tensor) -> Tensor:
    return exact(x)


def softly(x: Tensor) -> Tensor:
    return torch.exp(x * 20)


def squared_norm(x: Tensor) -> Tensor:
    return (x * 300).square().sum(-1)


def gated(x: Tensor) -> Tensor:
    return (x * 300) * (x * 301) * 1e-3


def normalized(x: Tensor) -> Tensor:
    x = x * 1e-4
    return x / ((x * x).mean(-1, keepdim=True) + 1e-12)


def rooted(x: Tensor) -> Tensor:
    return torch.relu(x * 0) / torch.sqrt(x.abs() * 0 + 1e-12)


def long_sum(x: Tensor) -> Tensor:
    return (x.abs() + 1).reshape(-1).repeat(100_000 // 32).sum()


def loss(x: Tensor) -> Tensor:
    return F.mse_loss(x * 300, x * 0)


def long_cumsum(x: Tensor) -> Tensor:
    return (x.abs() + 30).reshape(-1).repeat(100).cumsum(0)


def log_probability(x: Tensor) -> Tensor:
    return torch.log(torch.softmax((x > 0.5) * 30.0 + x, -1))


def scaled_scores(x: Tensor) -> Tensor:
    return torch.softmax((x @ x.t()) * 1e5, -1)


def large_scores(x: Tensor) -> Tensor:
    return torch.softmax((x * 300) @ (x * 300).t() * 1e-4, -1)


def large_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm((x.abs() + 1).repeat(1, 10_000) * 300, dim=-1)


def inverse(x: Tensor) -> Tensor:
    return torch.reciprocal(x * 1e-6 + 1e-5) * 1e-5


OVERFLOWS = (
    Fault(softly, "exp", {"allow": ["exp"]}),
    Fault(squared_norm, "square", {"allow": ["square", "sum"]}),
    Fault(gated, "mul_2", {"allow": ["mul"]}),
    Fault(normalized, "div", {"allow": ["add", "div", "mul", "mean"]}),
    Fault(rooted, "div", {"allow": ["add", "sqrt", "div", "mul"]}),
    Fault(long_sum, "sum_1", {"allow": ["sum"], "reduction_depth": {"sum": None}}),
    Fault(loss, "mse_loss", {"allow": ["mse_loss"]}),
    Fault(long_cumsum, "cumsum", {"allow": ["cumsum"], "reduction_depth": {"cumsum": None}}),
    Fault(log_probability, "log", {"allow": ["softmax", "log"]}),
    Fault(scaled_scores, "mul", {"allow": ["mul"]}),
    Fault(large_scores, "matmul"),  # as any conversion runs it
    Fault(large_norm, "linalg_vector_norm", {"allow": ["linalg_vector_norm"], "reduction_depth": None}),
    Fault(inverse, "reciprocal", {"allow": ["reciprocal", "add", "mul"]}),
)


def variance(x: Tensor) -> Tensor:
    x = x * 0.1 + 30
    return x.square().mean(-1) - x.mean(-1).square()


def small_angle(x: Tensor) -> Tensor:
    return (1 - torch.cos(x * 1e-2)) * 1e4


def coarsely(x: Tensor) -> Tensor:
    return coarse(x)


# Numbers that stay finite, and are wrong.
ERRORS = (
    Fault(variance, "sub", {"allow": ["add", "mul", "square", "mean", "sub"]}),
    Fault(small_angle, "rsub", {"allow": ["cos", "rsub"]}),
    Fault(coarsely, "coarse", {"allow": ["faults::coarse"]}),
)
