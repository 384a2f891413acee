"""``torch.set_grad_enabled`` as a statement in forward: the gradients of the model, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Switching(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.function = nn.Linear(16, 16), nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def switched_back(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.set_grad_enabled(False)
    first = m.a(x)
    torch.set_grad_enabled(True)
    return first, m.b(first)


def switched_back_behind_a_break(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.set_grad_enabled(False)
    first = m.a(x)
    torch._dynamo.graph_break()
    torch.set_grad_enabled(True)
    return first, m.b(first)


def off(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.set_grad_enabled(False)
    return m.a(x), m.b(x)


def off_later(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    first = m.a(x)
    torch.set_grad_enabled(False)
    return first, m.b(x)


def by_mode(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.set_grad_enabled(m.training)
    return m.a(x), m.b(x)


def on(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.set_grad_enabled(True)
    return m.a(x), m.b(x)


def seen(model: Any, with_gradients: bool) -> list[bool]:
    """Which results need gradients, and whether they are recorded behind the call."""
    with torch.set_grad_enabled(with_gradients):
        results = model(X)
        return [*(one.requires_grad for one in results), torch.is_grad_enabled()]


LEFT = {"off": (off, True), "off later": (off_later, True), "by mode": (by_mode, True), "on": (on, False)}


@pytest.mark.parametrize("name", LEFT)
def test_a_mode_that_is_left_is_refused_where_it_is_another(name: str) -> None:
    function, with_gradients = LEFT[name]
    amp_model = autocastfx.convert(Switching(function).eval(), dtype="bfloat16")
    with pytest.raises(
        CaptureError, match=rf"leaves gradients switched {'off' if with_gradients else 'on'} .*Write torch\.no"
    ):
        seen(amp_model, with_gradients)
    assert torch.is_grad_enabled()
    assert seen(amp_model, not with_gradients) == seen(Switching(function).eval(), not with_gradients)


def test_a_mode_that_is_switched_back_is_the_models() -> None:
    assert seen(autocastfx.convert(Switching(switched_back), dtype="bfloat16"), True) == [False, True, True]


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UncapturedGraphWarning")
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("function", [switched_back, switched_back_behind_a_break, off, off_later, by_mode, on])
def test_an_enabled_model_switches_as_the_model_does(function: Callable[..., Any], with_gradients: bool) -> None:
    model, plain = Switching(function).eval(), Switching(function).eval()
    autocastfx.enable(model, dtype="bfloat16")
    for _ in range(2):
        assert seen(model, with_gradients) == seen(plain, with_gradients)
