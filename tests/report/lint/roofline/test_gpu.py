"""The table of GPUs, and GPUs given by numbers."""

from __future__ import annotations

import math

import pytest

from autocastfx.errors import GpuError
from autocastfx.report.lint.roofline import Gpu, find_gpu, gpus


@pytest.mark.parametrize(
    ("name", "rates"),
    {
        "V100": (125, 15.7, 900),
        "T4": (65, 8.1, 320),
        "A100": (312, 19.5, 1555),
        "A100-80GB": (312, 19.5, 2039),
        "L4": (121, 30.3, 300),
        "L40S": (362, 91.6, 864),
        "RTX 4090": (165.2, 82.6, 1008),
        "RTX 5090": (209.5, 104.8, 1792),
        "H100": (989, 67, 3350),
        "H200": (989, 67, 4800),
        "B200": (2250, 75, 8000),
        "MI300X": (1307.4, 163.4, 5300),
    }.items(),
)
def test_the_table_holds_the_makers_numbers(name: str, rates: tuple[float, float, float]) -> None:
    gpu = find_gpu(name.lower())
    assert (gpu.name, gpu.tensor_tflops, gpu.float32_tflops, gpu.bandwidth_gb_s) == (name, *rates)
    assert any(word in gpu.source for word in ("datasheet", "data sheet", "whitepaper"))
    assert gpu.source.split()[0] in ("NVIDIA", "AMD")


def test_spaces_hyphens_and_case_do_not_matter() -> None:
    for name in ("rtx4090", "RTX-4090", "rtx 4090", "RTX_4090"):
        assert find_gpu(name).name == "RTX 4090"
    assert find_gpu("a100 80gb").name == "A100-80GB"


def test_the_first_tensor_cores_take_float16_alone() -> None:
    assert {gpu.name for gpu in gpus() if gpu.dtypes == ("float16",)} == {"V100", "T4"}
    assert all("bfloat16" in gpu.dtypes for gpu in gpus() if gpu.name not in ("V100", "T4"))


def test_balance_is_operations_a_byte() -> None:
    gpu = Gpu("mine", tensor_tflops=100, float32_tflops=10, bandwidth_gb_s=1000)
    assert gpu.balance(tensor_cores=True) == 100
    assert gpu.balance(tensor_cores=False) == 10


@pytest.mark.parametrize(
    ("name", "hint"), [("A10", "(did you mean 'A100'?)"), ("a1000", "'A100'?"), ("TPU", "Known: V")]
)
def test_an_unknown_gpu_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(GpuError) as caught:
        find_gpu(name)
    assert str(caught.value).startswith(f"no GPU is known as {name!r}")
    assert hint in str(caught.value)


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "fast", True])
def test_a_rate_is_a_finite_number_above_zero(rate: float) -> None:
    with pytest.raises(GpuError, match="bandwidth_gb_s of the GPU 'mine' is a finite number above 0"):
        Gpu("mine", 1, 1, rate)


@pytest.mark.parametrize("rate", [-1.0, math.inf, math.nan, "fast", True])
def test_a_rate_in_float8_may_be_none(rate: float) -> None:
    assert Gpu("mine", 1, 1, 1, float8_tflops=0).float8_tflops == 0
    with pytest.raises(GpuError, match="float8_tflops of the GPU 'mine' is a finite number from 0 on, not"):
        Gpu("mine", 1, 1, 1, float8_tflops=rate)
