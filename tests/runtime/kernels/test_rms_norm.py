"""The Triton kernels of a norm agree with float64, and errors planted in them are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.kernels.against_float64 import (
    DTYPES,
    check_many_rows,
    check_rms_norm,
    kernels,
    much_memory,
    with_error,
)

PLANTED = (
    ("_forward[(rows,)]", "_forward[(rows - 1,)]"),
    ("program * STEPS + step", "program * STEPS"),
    ("mask=row < rows, other=0.0", "mask=row < rows - 1, other=0.0"),
    ("/ width + eps", "/ BLOCK + eps"),
    ("/ width + eps", "/ width"),
    ("(tl.sum(gradient * normal, 0) / width)", "(tl.sum(gradient * normal, 0) / BLOCK)"),
    ("total += gradient * normal", "total = gradient * normal"),
    ("rows[:, None] < programs", "rows[:, None] < programs - 1"),
    ("            gradient = gradient * scale\n", "            pass\n"),
    ("x, gradient, width = x.contiguous(), gradient.contiguous()", "x, gradient, width = x, gradient.contiguous()"),
)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:divide by zero|invalid value:RuntimeWarning")  # numpy's, of infinities and NaN
def test_kernels_agree_with_float64(dtype: torch.dtype) -> None:
    check_rms_norm(kernels("rms_norm"), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_kernels_agree_with_float64(dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        check_rms_norm(kernels("rms_norm"), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
def test_on_a_gpu_more_numbers_than_32_bits_count() -> None:
    with much_memory():
        check_many_rows(kernels("rms_norm"))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number", range(len(PLANTED)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the fault computes
def test_a_planted_error_is_found(number: int, tmp_path: Path) -> None:
    module = with_error("rms_norm", *PLANTED[number], tmp_path)
    with pytest.raises(AssertionError):
        check_rms_norm(module, torch.float16)
