"""An optimizer that steps by gradients of a float16 loss that nothing scales is told of, once, and no other."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import UnscaledStepWarning
from autocastfx.training.unscaled_step import _HAVE_STEPPED

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
TOLD = "SGD steps by gradients of an unscaled float16 loss, of which small ones are 0"

Way = Callable[[nn.Module, str], nn.Module]


def converted(model: nn.Module, dtype: Any, **options: Any) -> nn.Module:
    return autocastfx.convert(model, X, dtype=dtype, **options)


def converted_later(model: nn.Module, dtype: Any) -> nn.Module:
    return autocastfx.convert(model, dtype=dtype)


def enabled(model: nn.Module, dtype: Any) -> nn.Module:
    return autocastfx.enable(model, dtype=dtype, inner="eager")


ways = pytest.mark.parametrize("way", [converted, converted_later, partial(converted, weights="cached"), enabled])


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def loss_of(model: nn.Module) -> Tensor:
    return model(X).square().mean()


def steps(model: nn.Module, step: Callable[[Tensor], object]) -> list[warnings.WarningMessage]:
    """Train for two steps, and return what is told of them."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UnscaledStepWarning)
        for _ in range(2):
            step(loss_of(model))
    return [one for one in told if one.category is UnscaledStepWarning]


def _bare(model: nn.Module) -> Callable[[Tensor], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    return step


@ways
def test_a_bare_optimizer_is_told_of_once_where_it_steps(way: Way) -> None:
    model = way(model_of(), "float16")
    [told] = steps(model, _bare(model))
    assert str(told.message).startswith(TOLD)
    assert told.filename == __file__


def test_a_call_without_gradients_does_not_count() -> None:
    model = autocastfx.convert(model_of(), dtype="float16")
    with torch.no_grad():
        model(X)
    assert len(steps(model, _bare(model))) == 1


def _scaled_by(scaler: Any) -> Callable[[nn.Module], Callable[[Tensor], object]]:
    def stepper(model: nn.Module) -> Callable[[Tensor], object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(loss: Tensor) -> None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    return stepper


def _wrapped(model: nn.Module) -> Callable[[Tensor], object]:
    optimizer = autocastfx.LossScalingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(loss: Tensor) -> None:
        optimizer.backward(loss)
        optimizer.step()

    return step


@ways
@pytest.mark.parametrize(
    ("stepper", "count"),
    [
        pytest.param(_scaled_by(torch.amp.GradScaler("cpu")), 0, id="torch's scaler"),
        pytest.param(_scaled_by(torch.amp.GradScaler("cpu", enabled=False)), 1, id="torch's scaler, switched off"),
        pytest.param(_scaled_by(autocastfx.GradScaler("cpu")), 0, id="GradScaler"),
        pytest.param(_wrapped, 0, id="LossScalingOptimizer"),
    ],
)
def test_a_loss_scale_is_seen(way: Way, stepper: Callable[[nn.Module], Callable[[Tensor], object]], count: int) -> None:
    model = way(model_of(), "float16")
    assert len(steps(model, stepper(model))) == count


def test_bfloat16_the_original_and_other_models_are_none_of_its_business() -> None:
    original, other = model_of(), model_of()
    amp_model = converted(original, "float16")
    for model in (original, other, converted(model_of(), "bfloat16")):
        assert not steps(model, _bare(model))
    assert amp_model(X).dtype == torch.float32


def test_a_model_that_is_gone_is_not_waited_for() -> None:
    model = converted(model_of(), "float16", check=False)
    loss_of(model).backward()
    waiting = len(_HAVE_STEPPED)
    del model
    gc.collect()
    assert len(_HAVE_STEPPED) < waiting
