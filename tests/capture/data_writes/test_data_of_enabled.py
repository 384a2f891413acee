"""``x.data = new`` in the forward of an enabled model, which Dynamo writes as a call and a count that it takes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import UnsupportedError
from tests.helpers import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16


class Assigns(nn.Module):
    """Gives a hidden value other numbers, or parameters the next ones."""

    def __init__(self, assign: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.assign = assign

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.exp(self.first(x))  # backward reads its output
        torch._dynamo.graph_break()  # so that it comes into the next graph
        self.assign(self, hidden)
        return self.last(hidden)


def _hidden(_: Any, hidden: Tensor) -> None:
    hidden.data = hidden.data * 0.5


def _twice(_: Any, hidden: Tensor) -> None:
    hidden.data = hidden.data * 0.5
    hidden.data = hidden.data + 1


def _parameter(model: Any, _: Tensor) -> None:
    model.last.weight.data = model.last.weight.data * 0.5


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    model(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("assign", [_hidden, _twice, _parameter])
def test_autograd_does_not_see_the_assignment(assign: Callable[[Any, Tensor], None]) -> None:
    torch.manual_seed(0)
    model, x = Assigns(assign), torch.randn(4, 8)
    enabled = autocastfx.enable(copy.deepcopy(model), dtype=LOW)
    assert 0 < relative_error(gradients(enabled, x), gradients(model, x)) < 8 * torch.finfo(LOW).eps
    assert torch.equal(enabled.get_parameter("last.weight"), model.last.weight)


def test_a_compiler_refuses_it_for_values_and_takes_it_for_parameters() -> None:
    x = torch.randn(4, 8)
    autocastfx.enable(Assigns(_parameter), dtype=LOW, inner="aot_eager")(x).sum().backward()
    with pytest.raises(UnsupportedError, match=r"assigns to the \.data of a tensor.* \(enable: inner=\"eager\"\)"):
        autocastfx.enable(Assigns(_hidden), dtype=LOW, inner="aot_eager")(x)
