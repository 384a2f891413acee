"""A Python number that changes between calls, given to code that a captured graph calls whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from tests.helpers import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
STRENGTHS = (0.1, 0.2, 0.3, 2)  # from the second float on Dynamo takes it for a variable


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return -ctx.strength * gradients[0], None


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.factor = low * high
        return x.clamp(-high, high) * low

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return gradients[0] * ctx.factor, None, None


class Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x * 2 if strength > 0.15 else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return gradients[0] * ctx.strength, None


class Model(nn.Module):
    """An adversarial model: the second half learns against the first, with a strength that grows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, strength: float) -> Tensor:
        return self.b(Reverse.apply(self.a(x), strength))


class TwoNumbers(Model):
    def forward(self, x: Tensor, strength: float) -> Tensor:
        return self.b(Scale.apply(self.a(x), strength, strength + 1))


class Branches(Model):
    def forward(self, x: Tensor, strength: float) -> Tensor:
        return self.b(Switch.apply(self.a(x), strength))


class InACheckpoint(Model):
    def forward(self, x: Tensor, strength: float) -> Tensor:
        return self.b(checkpoint(lambda y: Reverse.apply(self.a(y), strength), x, use_reentrant=False))


class Checkpointed(Model):
    def forward(self, x: Tensor, strength: float) -> Tensor:
        return self.b(checkpoint(lambda y, k: self.a(y).tanh() * k, x, strength, use_reentrant=False))


@pytest.mark.parametrize("kind", [Model, TwoNumbers, Branches, InACheckpoint, Checkpointed])
@pytest.mark.parametrize("op_list", ["float32", "default"])
def test_an_enabled_model_reads_the_number_of_each_call(kind: type[Model], op_list: str) -> None:
    torch.compiler.reset()
    model, reference = kind(), kind()
    autocastfx.enable(model, dtype=torch.bfloat16, op_list=op_list)
    most = 0.0 if op_list == "float32" else 4 * torch.finfo(torch.bfloat16).eps
    for strength in STRENGTHS:
        x = torch.randn(8, 32)
        found, expected = model(x, strength), reference(x, strength)
        assert relative_error(found.detach(), expected.detach()) <= most
        ours, theirs = (
            torch.autograd.grad(y.sum(), list(one.parameters())) for y, one in ((found, model), (expected, reference))
        )
        assert all(relative_error(a, b) <= most for a, b in zip(ours, theirs, strict=True))


def test_a_converted_model_reads_the_number_of_each_call() -> None:
    model = Model()
    amp_model = autocastfx.convert(model, (torch.randn(8, 32), 0.1), op_list="float32")
    for strength in STRENGTHS:
        x = torch.randn(8, 32)
        ours, theirs = (torch.autograd.grad(m(x, strength).sum(), model.a.weight) for m in (amp_model, model))
        assert torch.equal(ours[0], theirs[0])
