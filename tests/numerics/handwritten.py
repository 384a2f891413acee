"""Norms and softmaxes written out by hand, whose values in between leave the range of float16 on large inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["LISTED", "NORMALIZED", "RMS_NORMS", "Blocks"]


def rms_by_rsqrt(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_by_division(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def rms_by_power(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** -0.5


def rms_by_reciprocal(x: Tensor) -> Tensor:
    return x * (torch.mean(x**2, -1, keepdim=True) + 1e-6).sqrt().reciprocal()


RMS_NORMS = (rms_by_rsqrt, rms_by_division, rms_by_power, rms_by_reciprocal)


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


def layer_norm_by_moments(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def softmax(x: Tensor) -> Tensor:
    powers = torch.exp(x * 0.02)
    return powers / powers.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    scores = x * 0.02
    return scores - torch.log(torch.exp(scores).sum(-1, keepdim=True))


def unit_length(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def unit_length_in_groups(x: Tensor) -> Tensor:
    squares = (x * x).reshape(-1, 4, 4).sum(-1).sum(-1, keepdim=True)
    return x / torch.sqrt(squares.expand(-1, 16))


NORMALIZED = (layer_norm, layer_norm_by_moments, softmax, log_softmax, unit_length, unit_length_in_groups)

# What lets all of it into 16 bits.
LISTED = {
    "allow": ["pow", "square", "mul", "mean", "sum", "add", "sub", "div", "sqrt", "rsqrt", "reciprocal", "exp", "log"],
    "reduction_depth": None,
}


class _Norm(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.weight


class _Block(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.layer = _Norm(norm), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


class Blocks(nn.Module):
    """Residual blocks on 16 features, with a norm each. What is large stays large from the first to the last."""

    def __init__(self, norm: Callable[[Tensor], Tensor], blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(norm) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
