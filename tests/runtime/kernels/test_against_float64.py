"""The Triton kernels agree with float64, or to the bit with torch, and errors planted in them are found."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.runtime.kernels.against_float64 import (
    DTYPES,
    check_cross_entropy,
    check_many_rows,
    check_many_scores,
    check_rms_norm,
)
from tests.runtime.kernels.quantized import check_quantize

CHECKS: dict[str, Callable[[Any, torch.dtype], None]] = {
    "cross_entropy": check_cross_entropy,
    "rms_norm": check_rms_norm,
    "quantize": check_quantize,
}
PLANTED = {
    "cross_entropy": (
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
    ),
    "rms_norm": (
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
    ),
    "quantize": (
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
    ),
}


def kernels(name: str) -> ModuleType:
    return importlib.import_module(f"autocastfx.runtime.kernels.{name}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("ignore:divide by zero|invalid value:RuntimeWarning")  # numpy's, of infinities and NaN
def test_kernels_agree_with_float64(name: str, dtype: torch.dtype) -> None:
    CHECKS[name](kernels(name), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu_kernels_agree_with_float64(name: str, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        CHECKS[name](kernels(name), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("check", [check_many_scores, check_many_rows])
def test_on_a_gpu_more_numbers_than_32_bits_count(check: Callable[[Any], None]) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip(f"needs 24 GiB of free memory, and the device has {free / 2**30:.1f}")
    with torch.device("cuda"):
        check(kernels("cross_entropy" if check is check_many_scores else "rms_norm"))
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("name", "number"), [(name, i) for name, all_ in PLANTED.items() for i in range(len(all_))])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the fault computes
def test_a_planted_error_is_found(name: str, number: int, tmp_path: Path) -> None:
    before, after = PLANTED[name][number]
    source = Path(str(kernels(name).__file__)).read_text(encoding="utf-8")
    assert source.count(before) == 1
    planted = tmp_path / f"{name}.py"
    planted.write_text(source.replace(before, after), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"planted_{name}_{number}", planted)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError):
        CHECKS[name](module, torch.float16)
