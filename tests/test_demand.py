"""Demands: which ops run in float32 because of what they lead to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import OpList, Precision


class Normalised(nn.Module):
    """Values divided by the root of their energy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h / torch.sqrt(1 + (h * x).sum(-1, keepdim=True))


def test_a_sum_that_a_list_allows_is_no_product_of_values() -> None:
    """A demand through products overrules the shipped list's products, not what a person says of sums."""
    allowed = OpList.of({"allow": ["mul", "sum"]}, name="mine")
    plan = autocastfx.convert(Normalised(), (torch.rand(4, 8),), op_list=["default", allowed]).plan
    assert [plan[name].placement.run for name in ("mul", "sum_1", "sqrt")] == [
        Precision.LOW,
        Precision.LOW,
        Precision.FLOAT32,
    ]
