"""``requires_grad = True`` of a value that forward has computed: what the model does, or a refusal with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Asking(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.function = nn.Linear(16, 16), nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def asked(x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


def of_input(m: Any, x: Tensor) -> Tensor:
    """As wav2vec2 does for checkpointing."""
    return m.b(m.a(asked(x[:, :])))


def of_activation(m: Any, x: Tensor) -> Tensor:
    return m.b(asked(m.a(x).detach() + 1))


def given_out(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = asked(m.a(x).detach())
    return m.b(hidden), hidden


def stored(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    m.delta = asked(torch.zeros_like(x))
    return m.b(m.a(x + m.delta)), m.delta


def inner_gradient(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = asked(x.clone())
    (gradient,) = torch.autograd.grad(m.b(m.a(hidden)).square().sum(), hidden, create_graph=True)
    return gradient, gradient


def gradients(model: nn.Module, run: Callable[..., Any]) -> list[Tensor | None]:
    model.zero_grad()
    result = run(X)
    output, *others = result if isinstance(result, tuple) else (result,)
    output.square().mean().backward()
    return [p.grad for p in model.parameters()] + [one.grad for one in others if one.is_leaf]


def near(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours - theirs).norm() <= 4 * torch.finfo(torch.bfloat16).eps * theirs.norm() + 1e-6


@pytest.mark.parametrize("function", [of_input, of_activation])
def test_a_gradient_that_only_the_graph_could_read(function: Callable[..., Any]) -> None:
    model = Asking(function)
    amp_model = autocastfx.convert(model, (X,), dtype="bfloat16")
    plain = Asking(function)
    near(gradients(model, amp_model), gradients(plain, plain))


@pytest.mark.parametrize("function", [given_out, stored])
def test_a_value_that_is_given_out_is_refused_with_its_line(function: Callable[..., Any]) -> None:
    with pytest.raises(
        CaptureError, match=r"sets requires_grad of a value .* gives the value out \(.*test_leaves\.py:"
    ):
        autocastfx.convert(Asking(function), (X,), dtype="bfloat16")


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UncapturedGraphWarning")
@pytest.mark.parametrize("function", [of_input, of_activation, given_out, stored, inner_gradient])
def test_an_enabled_model_has_the_gradients_of_the_model(function: Callable[..., Any]) -> None:
    model, plain = Asking(function), Asking(function)
    autocastfx.enable(model, dtype="bfloat16")
    near(gradients(model, model), gradients(plain, plain))
