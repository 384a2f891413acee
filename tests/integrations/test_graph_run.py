"""A graph of an enabled model is converted again when numbers change on which its decisions rest."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import UncapturedGraphWarning
from tests.test_options import plans_of, told

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


LOW = torch.bfloat16


class Differences(nn.Module):
    """A product with a stencil that is a buffer: float32 as long as its rows add up to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("stencil", torch.eye(16) - torch.eye(16).roll(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.stencil


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_what_rests_on_a_buffer_is_decided_again_when_its_numbers_change(inner: str) -> None:
    x, given, other = torch.randn(2, 16), Differences(), torch.randn(16, 16)
    amp_model = autocastfx.convert(copy.deepcopy(given), (x,), dtype=LOW)
    autocastfx.enable(given, dtype=LOW, inner=inner)
    assert torch.equal(given(x), amp_model(x))
    assert told(plans_of(given)[0]) == (before := told(amp_model.plan))
    for one in (given, amp_model):
        one.get_buffer("stencil").copy_(other)
    slower = pytest.warns(UncapturedGraphWarning, match="runs op by op from now on")
    with slower if inner != "eager" else nullcontext():
        found = given(x)
    assert torch.equal(found, amp_model(x))
    assert told(plans_of(given)[0]) == told(amp_model.plan) != before
