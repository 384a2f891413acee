"""Nodes that give no float are placed too, if they read one."""

from __future__ import annotations

import torch

from autocastfx.plan.plan import Precision
from autocastfx.policy.rule import Category
from tests.decided import decided
from tests.helpers import Function

X = torch.linspace(-1, 1, 256).reshape(16, 16)


def test_a_comparison_of_a_float_with_whole_numbers_is_placed() -> None:
    """It gives no float, and one of its inputs is none; the other has a precision."""
    model = Function(lambda x, i: ((x @ x) > i, (x @ x).relu() > 0))
    plan = decided(model, X, torch.ones(16, 16, dtype=torch.int64), dtype=torch.bfloat16).plan
    assert plan["gt"].placement.run is not Precision.CAPTURED
    assert plan["gt_1"].placement.run is not Precision.CAPTURED


def test_what_shares_a_storage_runs_as_the_strongest_category_of_its_ops_says() -> None:
    """The product is not for 16 bits after exp; relu_, which only moves it, could be, and is first in the alphabet."""
    plan = decided(Function(lambda x: ((x @ x).exp() * 0.5).relu_() @ x), X, dtype=torch.float16).plan
    assert [plan[name].decision.category for name in ("mul", "relu_")] == [Category.INFER, Category.CLEAR]
    assert [plan[name].placement.run for name in ("mul", "relu_")] == [Precision.FLOAT32] * 2
