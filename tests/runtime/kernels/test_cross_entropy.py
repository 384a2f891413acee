"""The Triton kernels of a cross entropy agree with float64, and errors planted in them are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.kernels.against_float64 import (
    DTYPES,
    check_cross_entropy,
    check_many_scores,
    kernels,
    much_memory,
    with_error,
)

PLANTED = (
    ("_forward[(rows,)]", "_forward[(rows - 1,)]"),  # a lost row
    ("_backward[(rows, triton.cdiv(classes, block))]", "_backward[(rows, classes // block or 1)]"),
    ('other=-float("inf")).to', "other=0.0).to"),  # a wrong mask
    ("inside = columns < classes\n    target", "inside = columns < classes - 1\n    target"),
    ("tl.where(is_counted, logarithm - score, 0.0)", "logarithm - score"),  # no ignore_index
    ("tl.where(target == ignored, 0.0, result)", "result"),
    ('tl.where(new == -float("inf"), 0.0, new)', "new"),  # a difference of infinities
    ("total * tl.exp(largest - base)", "total"),  # a maximum that grows
    ("columns == target", "columns == target + 1"),
    ("row * gradient_stride", "row * 0"),
    ("columns * column_stride, mask=inside, other=0.0", "columns, mask=inside, other=0.0"),
)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:divide by zero|invalid value:RuntimeWarning")  # numpy's, of infinities and NaN
def test_kernels_agree_with_float64(dtype: torch.dtype) -> None:
    check_cross_entropy(kernels("cross_entropy"), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_kernels_agree_with_float64(dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        check_cross_entropy(kernels("cross_entropy"), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
def test_on_a_gpu_more_numbers_than_32_bits_count() -> None:
    with much_memory():
        check_many_scores(kernels("cross_entropy"))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number", range(len(PLANTED)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the fault computes
def test_a_planted_error_is_found(number: int, tmp_path: Path) -> None:
    module = with_error("cross_entropy", *PLANTED[number], tmp_path)
    with pytest.raises(AssertionError):
        check_cross_entropy(module, torch.float16)
