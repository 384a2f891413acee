"""Numbers counted by powers of two, and what float16 makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autocastfx.graph.magnitude import NOTHING, Exponents, Tally, read_tallies

CPU = torch.device("cpu")


def counted(*parts: torch.Tensor, factor: float | None = None) -> Exponents:
    tally = Tally(CPU)
    for part in parts:
        tally.add(part, None if factor is None else torch.tensor(factor))
    return read_tallies([tally])[0]


@settings(max_examples=100)
@given(st.lists(st.floats(width=32), max_size=30))
def test_each_number_is_counted_once_at_its_exponent(numbers: list[float]) -> None:
    found = counted(torch.tensor(numbers, dtype=torch.float32))
    finite = [abs(x) for x in numbers if math.isfinite(x) and x]
    expected: dict[int, int] = {}
    for x in finite:
        exponent = max(math.frexp(x)[1] - 1, -127)
        expected[exponent] = expected.get(exponent, 0) + 1
    assert found.counts == expected
    assert found.zeros == numbers.count(0.0)
    assert found.non_finite == sum(not math.isfinite(x) for x in numbers)
    assert found.largest == max(finite, default=0.0)
    assert found.total == len(finite)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_layouts_are_counted_too(dtype: torch.dtype) -> None:
    found = counted(torch.tensor([[1.0, 2.0], [0.5, 0.0]], dtype=dtype).t(), torch.empty(0, dtype=dtype))
    assert found == Exponents({-1: 1, 0: 1, 1: 1}, 1, 0, 2.0)


def test_a_factor_is_exact() -> None:
    assert counted(torch.tensor([2.0**-24, 3.0]).half(), factor=2.0**-16) == counted(
        torch.tensor([2.0**-40, 3 / 2**16])
    )


def test_the_shares_are_what_float16_does() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(20000) * 2.0 ** torch.randint(-40, 20, (20000,))
    for scale in (1.0, 2.0**10, 2.0**-3):
        low = (numbers * scale).half().float().abs()
        shares = counted(numbers).shares(scale)
        assert sum(shares) == pytest.approx(1)
        assert shares.zero == pytest.approx(float((low == 0).double().mean()))
        # Numbers from 65520 to 65536 become infinite as well, and those just below 2**-14 round up to it.
        assert shares.infinite == pytest.approx(float(low.isinf().double().mean()), abs=3e-3)
        assert shares.denormal == pytest.approx(float(((low > 0) & (low < 2**-14)).double().mean()), abs=3e-3)


@pytest.mark.parametrize("scale", [1.0, 2.0**12, 2.0**-3])
def test_the_margin_is_how_far_all_may_be_scaled(scale: float) -> None:
    numbers = torch.tensor([2.0**-20 * 1.25, -0.75, 0.0, 3.0])
    margin = counted(numbers).margin(scale)
    assert margin is not None

    def low(powers: int) -> torch.Tensor:
        return (numbers * scale * 2.0**powers).half().abs()

    assert low(margin.to_infinite).isfinite().all()
    assert low(margin.to_infinite + 1).isinf().any()
    assert low(-margin.to_denormal)[0] >= 2.0**-14 > low(-margin.to_denormal - 1)[0]
    assert low(-margin.to_zero)[0] > 0 == low(-margin.to_zero - 1)[0]
    assert NOTHING.margin(scale) is None


def test_a_scale_that_is_no_power_of_two_is_refused() -> None:
    for scale in (1000.0, 0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="a power of two here"):
            NOTHING.shares(scale)
    assert NOTHING.shares() == (0, 0, 0, 0)


def test_a_sum_is_what_all_together_give() -> None:
    first, second = torch.tensor([1.0, 0.0, math.inf]), torch.tensor([1.5, 8.0, 0.0, math.nan])
    assert counted(first) + counted(second) == counted(first, second)
    assert counted(first) + NOTHING == counted(first)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_gpu_counts_the_same_and_waits_for_nothing() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(1000) * 2.0 ** torch.randint(-40, 20, (1000,))
    tally, held = Tally(torch.device("cuda")), numbers.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tally.add(held)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read_tallies([tally]) == [counted(numbers)]
