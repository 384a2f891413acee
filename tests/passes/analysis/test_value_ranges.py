"""When a value reaches too far for 16 bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autocastfx.graph.magnitude import Magnitude, magnitude
from autocastfx.passes.analysis.value_ranges import Limit
from autocastfx.plan.plan import Precision
from tests.decided import decided

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


class Joined(torch.nn.Module):
    """Small parameters, and beside them what nobody measured."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.layer = torch.nn.Parameter(torch.full((4, 4), 1e-6)), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layer(x)
        return self.layer(torch.cat([x, self.small]) * x.repeat(2, 1)), self.layer(self.small.t() * x)


def test_what_is_not_known_is_not_small() -> None:
    plan = decided(Joined(), torch.randn(4, 4), fold="kernel", dtype="float16").plan
    assert plan["mul"].decision.source != "forced:range"
    assert plan["mul_1"].decision.reason.startswith("its input small has a root mean square of 1e-06, below float16's")


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_what_is_smaller_than_the_smallest_normal_number_is_lost(low: torch.dtype) -> None:
    limit = Limit(low)
    assert limit.smallest == torch.finfo(low).smallest_normal
    assert not limit.loses(Magnitude(1.0, limit.smallest))
    assert limit.loses(Magnitude(1.0, limit.smallest / 2))
    assert limit.loses(Magnitude(1e-40, 0.0)), "too small for a square"
    assert not limit.loses(Magnitude(0.0, 0.0)), "16 bits hold 0"


def test_below_the_smallest_normal_number_rounding_takes_more() -> None:
    """The reason for the limit: half of what subnormal numbers are apart, beside half an epsilon."""
    torch.manual_seed(0)
    noise = torch.randn(4096)
    for exponent, loses in ((-12, False), (-18, True)):
        x = noise * 2.0**exponent
        error = float((x.half().float() - x).norm() / x.norm())
        assert (error > torch.finfo(torch.float16).eps / 2) is loses
        found = magnitude(x)
        assert found is not None
        assert Limit(torch.float16).loses(found.magnitude()) is loses


@pytest.mark.parametrize(
    ("values", "largest", "rms", "others"),
    [
        ([1.0, -7.0, 0.0, 2.0, 0.0], 7.0, math.sqrt(18), 0),
        ([FLOAT32.min], FLOAT32.max, FLOAT32.max, 0),
        ([1e-30, -1e-30], 1e-30, 0.0, 0),
        ([float("-inf"), 2.0, float("nan")], 2.0, 2.0, 2),
        ([float("nan")], 0.0, 0.0, 1),
        ([0.0, -0.0], 0.0, 0.0, 0),
    ],
)
def test_magnitude(values: list[float], largest: float, rms: float, others: int) -> None:
    found = magnitude(torch.tensor(values))
    assert found is not None
    assert found.magnitude().largest == pytest.approx(largest, rel=FLOAT32.eps)
    assert found.magnitude().rms == pytest.approx(rms, rel=4 * FLOAT32.eps)
    assert int(found.non_finite) == others


def test_a_write_concerns_what_shares_its_storage_alone() -> None:
    """The parameter is beyond float16; the product, whose result is written into, is not."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.large = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 1e6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x).relu_()) + self.large.log()

    plan = decided(Writes(), torch.ones(4, 16), dtype="float16").plan
    assert [plan[name].placement.run for name in ("linear", "linear_1")] == [Precision.LOW] * 2


def test_magnitude_of_all_that_is_float32() -> None:
    both = magnitude({"a": [torch.tensor(1.0), torch.tensor([-2.0, math.inf])], "b": torch.tensor([9.0]).double()})
    assert both is not None
    assert (both.magnitude(), int(both.non_finite)) == (Magnitude(2.0, 2.0), 1)
    with FakeTensorMode():
        assert magnitude(torch.ones(2)) is None
    nothing = [torch.ones(0), torch.ones(2).half(), torch.ones(2).to_sparse(), torch.ones(2, device="meta"), 3.0, None]
    assert all(magnitude(one) is None for one in nothing)
    assert magnitude(torch.ones(2, requires_grad=True).expand(5, 2)) is not None
