"""When a value reaches too far for 16 bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autocastfx.magnitude import magnitude
from autocastfx.reach import Limit

FLOAT32 = torch.finfo(torch.float32)


@pytest.mark.parametrize("headroom", [1.0, 2.0, 1000.0])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_value_at_the_limit_has_passed_it(low: torch.dtype, headroom: float) -> None:
    limit = Limit(low, headroom)
    at = limit.largest / headroom
    assert limit.passed(at)
    assert not limit.passed(math.nextafter(at, 0))


def test_the_limit_in_words() -> None:
    assert Limit(torch.float16, 2.0).shown(65504.0) == "within a factor 2 of float16's 65504"
    assert Limit(torch.float16, 1.5).shown(65505.0) == "beyond float16's 65504"
    assert Limit(torch.bfloat16).shown(FLOAT32.max) == "beyond bfloat16's 3.3895e+38"


@pytest.mark.parametrize(
    ("values", "largest", "others"),
    [
        ([1.0, -3.0, 2.0], 3.0, 0),
        ([FLOAT32.min], FLOAT32.max, 0),
        ([float("-inf"), 2.0, float("nan")], 2.0, 2),
        ([float("nan")], 0.0, 1),
        ([0.0, -0.0], 0.0, 0),
    ],
)
def test_magnitude(values: list[float], largest: float, others: int) -> None:
    found = magnitude(torch.tensor(values))
    assert found is not None
    assert (float(found[0]), int(found[1])) == (largest, others)


def test_magnitude_of_all_that_is_float32() -> None:
    both = magnitude({"a": [torch.tensor(1.0), torch.tensor([-2.0, math.inf])], "b": torch.tensor([9.0]).double()})
    assert both is not None
    assert (float(both[0]), int(both[1])) == (2.0, 1)
    with FakeTensorMode():
        assert magnitude(torch.ones(2)) is None
    nothing = [torch.ones(0), torch.ones(2).half(), torch.ones(2).to_sparse(), torch.ones(2, device="meta"), 3.0, None]
    assert all(magnitude(one) is None for one in nothing)
    assert magnitude(torch.ones(2, requires_grad=True).expand(5, 2)) is not None
