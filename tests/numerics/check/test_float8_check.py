"""``check`` of float8 plans: right ones are right by every recipe, and planted faults are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx import OpList
from autocastfx.numerics.check import Check, allowance
from autocastfx.runtime.operators import float8
from tests.helpers import Net

LOW = torch.bfloat16
BATCHES = [torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def loss(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Net(
            lambda m, x: x + m.down(F.gelu(m.up(m.norm(x)))),
            norm=nn.LayerNorm(64),
            up=nn.Linear(64, 128),
            down=nn.Linear(128, 64),
        )


def checked(recipe: str = "rowwise", **keys: Any) -> Check:
    options = {name: keys.pop(name) for name in ("sensitivity",) if name in keys}
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"], "recipe": recipe, **keys}]})
    return autocastfx.check(mlp(), BATCHES, loss, dtype=LOW, op_list=lists, **options)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_gw_hp", "mxfp8"])
def test_a_right_plan_is_right(recipe: str) -> None:
    found = checked(recipe)
    assert found.ok, found
    assert "with products in float8 they may be" in str(found)
    error = next(one for one in found.values if one.name == "all gradients")
    assert error.ratio > 3  # than torch.autocast's: without the allowance it would be inexact
    assert '"float8"' in found.to_json()


def test_what_is_predicted_allows_less() -> None:
    measured = autocastfx.sensitivity(mlp(), BATCHES, loss, dtype=LOW, float8=True)
    stated, predicted = checked(), checked(sensitivity=measured)
    assert predicted.ok
    assert stated.float8 is not None
    assert predicted.float8 is not None
    assert predicted.float8.gradients < stated.float8.gradients == 32
    assert "as predicted of the gradient" in str(predicted)


def test_products_in_backward_alone_leave_outputs_as_they_were() -> None:
    found = checked(products=["input_gradient", "weight_gradient"])
    assert found.ok
    assert found.float8 is not None
    assert found.float8.outputs == 1.2


def test_without_float8_nothing_is_allowed_or_written() -> None:
    found = autocastfx.check(mlp(), BATCHES, loss, dtype=LOW)
    assert found.ok
    assert found.float8 is None
    assert "float8" not in found.to_json() + str(found)
    assert allowance([autocastfx.convert(mlp(), BATCHES[0], dtype=LOW, check=False).plan], None) is None


def test_an_enabled_model_is_judged_alike() -> None:
    model = autocastfx.enable(
        mlp(), dtype=LOW, op_list=OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"]}]})
    )
    found = autocastfx.check(model, BATCHES[:1], loss)
    assert found.ok, found
    assert found.float8 is not None


@pytest.mark.parametrize("fault", ["scale", "transposed", "one layer"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = float8._product

    def wrong(left: Any, other: Any, *rest: Any, **named: Any) -> Tensor:
        if fault == "scale":  # of one operand: a half is lost
            return right(left, other._replace(scale=other.scale * 2), *rest, **named)
        if fault == "transposed":  # rows in another order
            return right(
                left._replace(data=left.data.view(torch.uint8).flip(0).view(left.data.dtype)), other, *rest, **named
            )
        is_down = other.data.shape == (64, 128)
        return right(left, other._replace(scale=other.scale * 2) if is_down else other, *rest, **named)

    monkeypatch.setattr(float8, "_product", wrong)
    found = checked()
    assert not found.ok
    assert {one.name for one in found.inexact} >= {"all gradients"}
