"""Nodes that give no float are placed too, if they read one."""

from __future__ import annotations

import torch

from autocastfx.plan.plan import Precision
from tests.decided import decided
from tests.helpers import Function

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def test_a_comparison_of_a_float_with_whole_numbers_is_placed() -> None:
    """It gives no float, and one of its inputs is none; the other has a precision."""
    model = Function(lambda x, i: ((x @ x) > i, (x @ x).relu() > 0))
    plan = decided(model, X, torch.ones(4, 4, dtype=torch.int64), dtype=torch.bfloat16).plan
    assert plan["gt"].placement.run is not Precision.CAPTURED
    assert plan["gt_1"].placement.run is not Precision.CAPTURED
