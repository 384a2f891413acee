"""The counts of a step are exact, on a model whose every tensor can be counted by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from benchmarks.step_counts import Casts, Saved, count

BATCH = 3
PARAMETERS = 8 * 9 + 9 + 9 * 2 + 2
CAST = 6  # bytes an element


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 2))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


@pytest.mark.parametrize("way", ["torch.autocast", "cast", "cached"])
def test_casts_are_told_apart_by_what_they_cast(way: str) -> None:
    model: Any = perceptron()
    x = torch.ones(BATCH, 8)
    region = torch.autocast("cpu", torch.bfloat16) if way == "torch.autocast" else contextlib.nullcontext()
    if way != "torch.autocast":
        model = autocastfx.convert(model, (x,), dtype=torch.bfloat16, weights=way, keep_output_dtype=False)

    def work() -> None:
        with region:
            loss = loss_of(model, x)
        loss.backward()

    found = count(model, [x], work)
    assert found.weights == found.gradients == Casts(4, CAST * PARAMETERS)
    assert found.activations == Casts(3, CAST * BATCH * (8 + 2 + 2)), "the input; the output, and its gradient"
    # what the activation gives, the widened output, but not the cast input; the weight that a gradient passes
    assert found.saved() == Saved(2 * BATCH * 9 + 4 * BATCH * 2, 2 * 9 * 2)


def test_working_copies_are_cast_once_for_an_update() -> None:
    x = torch.ones(BATCH, 8)
    model = autocastfx.convert(perceptron(), (x,), dtype=torch.bfloat16, weights="cached", keep_output_dtype=False)
    assert count(model, [x], lambda: loss_of(model, x)).weights.count == 4
    fresh = count(model, [x], lambda: loss_of(model, x))
    assert fresh.weights == Casts()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert count(model, [x], lambda: loss_of(model, x)).weights == Casts(1, CAST * 8 * 9)


def test_views_allocations_and_casts_of_integers_are_not_counted() -> None:
    x = torch.ones(2, 3)
    found = count(nn.Identity(), [], lambda: (x.t().contiguous()[0] + 1).long().float())
    assert found.ops == 4, "a copy, a sum and two casts"
    assert count(nn.Identity(), [], lambda: (torch.empty_like(x), torch.empty(3), x.new_empty(2), x[0])).ops == 0
    assert found.activations == Casts()
    assert count(nn.Identity(), [], lambda: x.double()).activations == Casts(1, 12 * 6)


def test_a_storage_that_is_saved_twice_counts_once_and_inputs_do_not() -> None:
    weight = nn.Parameter(torch.ones(4))
    x = torch.ones(8)

    def work() -> Tensor:
        half = x[:4] * weight  # saves the input's storage, and the weight's
        return half * half.sin()  # saves `half` twice, and its sine

    assert count(nn.ParameterList([weight]), [x], work).saved() == Saved(4 * 4 * 2, 0)
    assert count(nn.Identity(), [], work).saved() == Saved(4 * 8 + 4 * 4 * 2, 0)
