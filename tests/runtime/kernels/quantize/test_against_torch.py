"""The Triton kernels that quantise agree with torch to the bit, and errors planted in them are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.kernels.against_float64 import DTYPES, kernels, with_error
from tests.runtime.kernels.quantized import check_quantize

PLANTED = (
    ("wide < 1e-12, 1e-12, wide", "wide > 1e-12, wide, 1e-12"),  # a NaN that gets lost
    ("scaled > MOST, MOST, tl.where(scaled < -MOST, -MOST, scaled)", "scaled < MOST, scaled, MOST"),
    ("tl.where(scale == scale, power.to(tl.float32, bitcast=True), scale)", "power.to(tl.float32, bitcast=True)"),
    ("_by_rows[(rows,)]", "_by_rows[(rows - 1,)]"),
    ("tl.store(scales + row, scale)", "tl.store(scales + row, scale + scale)"),
    ("largest = tl.maximum(largest, _magnitudes(values))", "largest = _magnitudes(values)"),  # of a wide row
    ("            tl.store(to + at, ", "            tl.store(to + columns, "),
    ("largest = tl.maximum(largest, magnitudes)", "largest = magnitudes"),
    ("tl.max(magnitudes, 1), mask=row < rows", "tl.max(magnitudes, 1), mask=row < rows - 1"),
    ("tl.max(largest, 0), mask=column < width", "tl.max(largest, 0), mask=column < width - 1"),
    ("mask=at < count, other=0)", "mask=at < count - 1, other=0)"),
    ("scale[:, None], MOST", "scale[None, :], MOST"),  # the other layout's scales
    ("column[None, :] * rows + row[:, None]", "column[None, :] + row[:, None] * width"),  # not transposed
    ("across * triton.cdiv(down, _STEPS)", "across * (down // _STEPS)"),
    ("of_columns, of_rows = _by_columns(x.t()", "of_rows, of_columns = _by_columns(x.t()"),
    ("return quantize_columns(x.t(), dtype, power_of_two)", "return quantize_columns(x, dtype, power_of_two)"),
)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:divide by zero|invalid value:RuntimeWarning")  # numpy's, of infinities and NaN
def test_kernels_agree_with_torch(dtype: torch.dtype) -> None:
    check_quantize(kernels("quantize"), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_kernels_agree_with_torch(dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        check_quantize(kernels("quantize"), dtype)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number", range(len(PLANTED)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the fault computes
def test_a_planted_error_is_found(number: int, tmp_path: Path) -> None:
    module = with_error("quantize", *PLANTED[number], tmp_path)
    with pytest.raises(AssertionError):
        check_quantize(module, torch.float16)
