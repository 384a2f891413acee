"""Least times, and Amdahl's law, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autocastfx.errors import GpuError
from autocastfx.report.lint.roofline import Bound, Gpu, Total, Work, bound, limit, total

GPU = Gpu("mine", tensor_tflops=1, float32_tflops=0.1, bandwidth_gb_s=10)  # 100 and 10 operations a byte
LOW, WIDE = ("bfloat16",), ("float32",)


@pytest.mark.parametrize(
    ("work", "seconds", "by"),
    [
        (Work(2_000_000, 10_000, LOW), 2e-6, "compute"),
        (Work(2_000_000, 10_000, WIDE), 2e-5, "compute"),
        (Work(500_000, 10_000, LOW), 1e-6, "memory"),
        (Work(500_000, 10_000, WIDE), 5e-6, "compute"),
        (Work(0, 10_000, LOW), 1e-6, "memory"),
        (Work(None, 10_000, LOW), 1e-6, "memory"),
        (Work(0, 0, WIDE), 0.0, "memory"),
    ],
)
def test_the_longer_of_computing_and_moving(work: Work, seconds: float, by: str) -> None:
    found = bound(work, GPU)
    assert found.seconds == pytest.approx(seconds)
    assert found.by == by
    assert found.balance == (100 if work.low else 10)


def test_products_in_float8_have_a_rate_of_their_own() -> None:
    work = Work(2_000_000, 10_000, ("float8_e4m3fn", "float32"), in_float8=True)
    found = bound(work, replace(GPU, float8_tflops=4))
    assert (found.seconds, found.by, found.balance) == (pytest.approx(1e-6), "memory", 400)
    assert bound(replace(work, bytes=1000), replace(GPU, float8_tflops=4)).seconds == pytest.approx(5e-7)
    with pytest.raises(GpuError, match=r"no float8 rate is known of mine, .* choose one of L4, L40S, H100, H200, B200"):
        bound(work, GPU)


def test_intensity_is_operations_a_byte() -> None:
    assert bound(Work(300, 100, LOW), GPU) == Bound(1e-8, 3.0, 100.0)


def test_totals_tell_products_from_the_rest() -> None:
    works = [Work(2_000_000, 10_000, LOW), Work(0, 20_000, WIDE), Work(None, 10_000, LOW)]
    found = total(works, GPU)
    assert found == Total(pytest.approx(5e-6), pytest.approx(2e-6))
    assert found.share == pytest.approx(0.4)
    assert total([], GPU) == Total(0, 0)
    assert total([], GPU).share == 0


@pytest.mark.parametrize(
    ("share", "speedup", "expected"),
    [(0.5, 2, 4 / 3), (0.5, math.inf, 2), (0.9, math.inf, 10), (0, 8, 1), (1, 8, 8), (1, math.inf, math.inf)],
)
def test_amdahls_law(share: float, speedup: float, expected: float) -> None:
    assert limit(share, speedup) == pytest.approx(expected)
