"""Models that are right, and that end their process."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


class Ends(nn.Module):
    """Ends the process where it runs in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            os._exit(0)
        return self.layer(x)


def _inputs() -> Given:
    return (torch.randn(4, 8),), {}


CASES = (
    Case("ends", Ends, _inputs),
    Case("right", lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), _inputs),
)
