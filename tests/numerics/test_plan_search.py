"""A search measures the plans that its predictions, scaled by what was measured so far, find best within the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.numerics.budget import Limit, Point
from autocastfx.numerics.plan_search import Found, _next

PLAN = autocastfx.convert(nn.Linear(4, 4), torch.randn(2, 4), dtype="bfloat16").plan


def found(moved: int, predicted: float, measured: float | None = None) -> Found:
    plan = replace(PLAN, traffic=replace(PLAN.traffic, moved=moved), error=predicted)
    return Found(Point("cut", moved, predicted, measured), plan)


@pytest.mark.parametrize(("predicted", "is_measured"), [(0.99, True), (1.01, False)])
def test_a_plan_predicted_beyond_a_limit_of_errors_is_not_measured(predicted: float, is_measured: bool) -> None:
    plan = found(100, predicted)
    assert _next([plan], Limit(error=1.0), [1.0], []) == (plan if is_measured else None)


@pytest.mark.parametrize(("ratios", "moved"), [([1.0], 100), ([1.0, 2.0, 2.0], 200)])
def test_predictions_are_scaled_by_what_was_measured(ratios: list[float], moved: int) -> None:
    plans = [found(100, 0.9), found(200, 0.45)]
    chosen = _next(plans, Limit(error=1.0), ratios, [])
    assert chosen is not None
    assert chosen.point.bytes == moved


@pytest.mark.parametrize(("predicted", "is_measured"), [(1.2, True), (1.3, False)])
def test_within_a_limit_of_bytes_one_predicted_a_little_worse_is_measured(predicted: float, is_measured: bool) -> None:
    tried, plan = found(90, 1.0, measured=1.0), found(100, predicted)
    assert _next([plan], Limit(bytes=100), [1.0], [tried]) == (plan if is_measured else None)
    assert _next([plan], Limit(bytes=99), [1.0], [tried]) is None
