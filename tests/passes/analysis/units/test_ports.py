"""Which inputs of a node are not cast, by device and by what sets the precision of a result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autocastfx.plan.plan import Precision
from tests.decided import decided

LOW = torch.bfloat16


@pytest.mark.parametrize(
    ("device", "norm", "name", "dtype", "cast"),
    [
        ("cpu", nn.GroupNorm(2, 8), "group_norm", "bfloat16", False),
        ("cuda", nn.GroupNorm(2, 8), "group_norm", "float32", False),
        ("cpu", nn.LayerNorm(8), "layer_norm", "bfloat16", False),
        ("cuda", nn.LayerNorm(8), "layer_norm", "bfloat16", True),
    ],
)
def test_which_norms_take_float32_parameters_is_asked_of_the_device(
    device: str, norm: nn.Module, name: str, dtype: str, cast: bool
) -> None:
    """Beside 16-bit values, on a CPU; on a GPU none of these does. No GPU is needed to convert."""
    model = nn.Sequential(nn.Conv1d(8, 8, 1), norm, nn.Conv1d(8, 8, 1))
    plan = decided(model, torch.rand(2, 8, 8), dtype=LOW, fold="kernel", device=device).plan
    assert plan[name].dtype == dtype
    assert ("_1_weight" in {c.value for c in plan.casts}) is cast


@pytest.mark.parametrize("first", [False, True])
def test_a_0d_value_beside_others_sets_no_precision_and_is_not_cast(first: bool) -> None:
    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        return (factor * (x @ x) if first else (x @ x) * factor) @ x

    plan = decided(scaled, torch.rand(8, 8), torch.tensor(0.3), dtype=LOW).plan
    assert plan["mul"].placement.run is Precision.LOW
    assert plan["mul"].placement.as_stored == ("self" if first else "other",)
    assert "args_1" not in {c.value for c in plan.casts}


def test_0d_values_alone_set_the_precision() -> None:
    def halves(x: Tensor, factor: Tensor) -> Tensor:
        return (x @ x).sum() * factor

    plan = decided(halves, torch.rand(8, 8), torch.tensor(0.3), dtype=LOW).plan
    assert plan["mul"].placement.run is Precision.FLOAT32
    assert "args_1" not in {c.value for c in plan.casts}
