"""A matrix in float8 with a scale for each row, for each column, or both at once, in Triton kernels.

By rows, a program holds a row and reads it once; it reads a longer one twice. By columns, one kernel finds the largest
magnitudes and another writes the matrix transposed: two reads, which do for both layouts, too.
"""

# Kernels are written in Triton's language, which type checkers do not know.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 16_384  # the longest row that a program holds
_PART = 4096  # of a longer row, which it reads twice
_ROWS, _COLUMNS = 128, 64  # of the block that it holds of columns
_STEPS = 4  # blocks, one below the other, whose largest magnitudes a program finds
_SCALES = 256  # that a program computes
_Made = tuple[Tensor, Tensor]


@triton.jit
def _magnitudes(values):
    # As whole numbers their bits have the order of the numbers, and NaN is above Inf: a maximum keeps it.
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(largest, MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return the scale for the bits of a largest magnitude: the operator's, to the bit."""
    wide = largest.to(tl.float32, bitcast=True)
    # Of a quotient that float64 rounds first, float32 is the same.
    scale = tl.div_rn(MOST, tl.where(wide < 1e-12, 1e-12, wide))
    if POWER_OF_TWO:
        # Rounded down, but for the few numbers just below a power of two whose logarithm float32 rounds to the power's:
        # ln 2 times as many as the logarithm has units in 2 ** -23.
        bits = scale.to(tl.int32, bitcast=True)
        units = (((bits >> 23) - 126.5).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = (bits + (units * 0.6931472).to(tl.int32)) & 0x7F800000
        scale = tl.where(scale == scale, power.to(tl.float32, bitcast=True), scale)  # NaN stays
    return scale


@triton.jit
def _scaled(values, scale, MOST: tl.constexpr):
    scaled = values.to(tl.float32) * scale
    return tl.where(scaled > MOST, MOST, tl.where(scaled < -MOST, -MOST, scaled))  # NaN stays


@triton.jit
def _by_rows(
    x, row_stride, column_stride, width, made, scales,
    MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own, to = x + row * row_stride, made + row * width
    columns = tl.arange(0, BLOCK).to(tl.int64)
    if STEPS == 1:
        values = tl.load(own + columns * column_stride, mask=columns < width, other=0.0)
        scale = _scale(tl.max(_magnitudes(values), 0), MOST, POWER_OF_TWO)
        tl.store(to + columns, _scaled(values, scale, MOST).to(made.dtype.element_ty), mask=columns < width)
    else:
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, STEPS * BLOCK, BLOCK):
            at = start + columns
            values = tl.load(own + at * column_stride, mask=at < width, other=0.0)
            largest = tl.maximum(largest, _magnitudes(values))
        scale = _scale(tl.max(largest, 0), MOST, POWER_OF_TWO)
        for start in range(0, STEPS * BLOCK, BLOCK):
            at = start + columns
            values = tl.load(own + at * column_stride, mask=at < width, other=0.0)
            tl.store(to + at, _scaled(values, scale, MOST).to(made.dtype.element_ty), mask=at < width)
    tl.store(scales + row, scale)


@triton.jit
def _block(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first row and the columns of a program's block of ``ROWS``; blocks lie side by side first."""
    program, across = tl.program_id(0).to(tl.int64), tl.cdiv(width, COLUMNS)
    return program // across * ROWS, program % across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _largest(
    x, row_stride, column_stride, rows, width, of_rows, of_columns,
    BOTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    first, column = _block(width, ROWS * STEPS, COLUMNS)
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for step in range(0, STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        values = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
        magnitudes = _magnitudes(values)
        largest = tl.maximum(largest, magnitudes)
        if BOTH:
            tl.atomic_max(of_rows + row, tl.max(magnitudes, 1), mask=row < rows, sem="relaxed")
    tl.atomic_max(of_columns + column, tl.max(largest, 0), mask=column < width, sem="relaxed")


@triton.jit
def _scales(bits, count, MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr):
    """Put scales in the place of the bits of largest magnitudes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = _scale(tl.load(bits + at, mask=at < count, other=0), MOST, POWER_OF_TWO)
    tl.store(bits + at, scale.to(tl.int32, bitcast=True), mask=at < count)


@triton.jit
def _write(
    x, row_stride, column_stride, rows, width, of_rows, of_columns, by_rows, by_columns,
    MOST: tl.constexpr, BOTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, column = _block(width, ROWS, COLUMNS)
    row = first + tl.arange(0, ROWS)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    values = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    dtype = by_columns.dtype.element_ty
    if BOTH:
        scale = tl.load(of_rows + row, mask=row < rows, other=0.0)
        to = by_rows + row[:, None] * width + column[None, :]
        tl.store(to, _scaled(values, scale[:, None], MOST).to(dtype), mask=inside)
    scale = tl.load(of_columns + column, mask=column < width, other=0.0)
    to = by_columns + column[None, :] * rows + row[:, None]
    tl.store(to, _scaled(values, scale[None, :], MOST).to(dtype), mask=inside)


def quantize_rows(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> _Made:
    """Quantise a matrix with a scale for each row.

    Args:
        x: not empty, of any strides: float16, bfloat16 or float32.
        dtype: of the result, with float8 tensor cores on the device.
        power_of_two: scales are rounded down to a power of two.

    Returns:
        The contiguous result, and the column of scales.
    """
    if x.stride(0) < x.stride(1):
        return quantize_columns(x.t(), dtype, power_of_two)
    rows, width = x.shape
    made, scales = x.new_empty(x.shape, dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32)
    block = triton.next_power_of_2(width) if width <= _WIDEST else _PART
    named = {"MOST": torch.finfo(dtype).max, "POWER_OF_TWO": power_of_two, "BLOCK": block}
    named |= {"STEPS": triton.cdiv(width, block), "num_warps": min(max(block // 512, 1), 16)}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _by_rows[(rows,)](x, *x.stride(), width, made, scales, **named)
    return made, scales


def quantize_columns(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> _Made:
    """Quantise a matrix with a scale for each column; as :func:`quantize_rows` does with its transpose."""
    if x.stride(0) < x.stride(1):
        return quantize_rows(x.t(), dtype, power_of_two)
    return _by_columns(x, dtype, power_of_two, both=False)[1]


def quantize_both(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[_Made, _Made]:
    """Return what :func:`quantize_rows` and :func:`quantize_columns` do, of two reads; the scales share a storage."""
    if x.stride(0) < x.stride(1):
        of_columns, of_rows = _by_columns(x.t(), dtype, power_of_two, both=True)
        return of_rows, of_columns
    return _by_columns(x, dtype, power_of_two, both=True)


def _by_columns(x: Tensor, dtype: torch.dtype, power_of_two: bool, *, both: bool) -> tuple[_Made, _Made]:
    """Quantise a matrix by columns, and if ``both`` by rows; else the first result is empty."""
    rows, width = x.shape
    counted, most = rows if both else 0, torch.finfo(dtype).max
    bits = torch.zeros((counted + width, 1), dtype=torch.int32, device=x.device)
    of_rows, of_columns = bits.view(torch.float32).split([counted, width])
    by_rows, by_columns = x.new_empty((counted, width), dtype=dtype), x.new_empty((width, rows), dtype=dtype)
    given, sizes = (x, *x.stride(), rows, width), {"BOTH": both, "ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 16}
    across, down = triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS)
    with torch.cuda.device_of(x):
        _largest[(across * triton.cdiv(down, _STEPS),)](*given, *bits.split([counted, width]), **sizes, STEPS=_STEPS)
        _scales[(triton.cdiv(len(bits), _SCALES),)](
            bits, len(bits), MOST=most, POWER_OF_TWO=power_of_two, BLOCK=_SCALES
        )
        _write[(across * down,)](*given, of_rows, of_columns, by_rows, by_columns, **sizes, MOST=most)
    return (by_rows, of_rows), (by_columns, of_columns)
