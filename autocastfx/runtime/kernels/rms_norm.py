"""The norm by the root mean square of rows (Zhang & Sennrich 2019), in three Triton kernels: one forward, two backward.

The input may be 16-bit beside a float32 weight. Everything is computed in float32 and rounded once, at the store; the
gradient of the weight is added up in float32, in an order that depends on sizes alone.
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

_PROGRAMS = 512  # the most sums of the weight's gradient that are kept apart
_ROWS, _COLUMNS = 32, 128  # of the block in which they are added up


@triton.jit
def _forward(x, weight, made, rstds, eps, width: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    result = values * rstd
    if WEIGHTED:
        result = result * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(made + row * width + columns, result.to(made.dtype.element_ty), mask=inside)
    tl.store(rstds + row, rstd)


@triton.jit
def _backward(
    gradients, x, weight, rstds, made, sums, rows,
    width: tl.constexpr, WEIGHTED: tl.constexpr, SUMMED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < width
    total, scale = tl.zeros((BLOCK,), tl.float32), 1.0
    if WEIGHTED:
        scale = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    for step in range(0, STEPS):
        row = program * STEPS + step
        place, inside = row * width + columns, is_column & (row < rows)
        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
        normal = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * rstd
        if SUMMED:
            total += gradient * normal
        if WEIGHTED:
            gradient = gradient * scale
        result = rstd * (gradient - normal * (tl.sum(gradient * normal, 0) / width))
        tl.store(made + place, result.to(made.dtype.element_ty), mask=inside)
    if SUMMED:
        tl.store(sums + program * width + columns, total, mask=is_column)


@triton.jit
def _add_up(
    sums, made, programs,
    width: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, PROGRAMS, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < programs) & (columns[None, :] < width)
        total += tl.sum(tl.load(sums + rows[:, None] * width + columns[None, :], mask=inside, other=0.0), 0)
    tl.store(made + columns, total.to(made.dtype.element_ty), mask=columns < width)


def normalize(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the norm of each row.

    Args:
        x: float16, bfloat16 or float32; a program holds one row, so its last size is at most 8192.
        weight: as long as a row, of any of these dtypes.
        eps: added to the mean square.

    Returns:
        The result, contiguous, of the shape and dtype of ``x``; and for each row, in float32, one over the root mean
        square, which backward reads.
    """
    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width if width else 0
    made, rstds = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        given = x, None if weight is None else weight.contiguous(), made, rstds, eps
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(rows,)](*given, width=width, WEIGHTED=weight is not None, **_sizes(width))
    return made, rstds


def differentiate(
    gradient: Tensor, x: Tensor, weight: Tensor | None, rstds: Tensor, *, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of the input and, if ``of_weight``, of the weight.

    Args:
        gradient: of the result, of any floating dtype up to float32.
        x: as for :func:`normalize`, as is ``weight``.
        weight: see above.
        rstds: the second result of :func:`normalize`.
        of_weight: False: the weight's is None.

    Returns:
        Each of the shape and dtype of what it is the gradient of, contiguous.
    """
    x, gradient, width = x.contiguous(), gradient.contiguous(), x.shape[-1]
    rows, made = len(rstds), torch.empty_like(x)
    wanted = weight if of_weight else None
    steps = triton.next_power_of_2(triton.cdiv(rows, _PROGRAMS)) if rows else 1
    programs = triton.cdiv(rows, steps)
    sums = x.new_empty((programs, width) if wanted is not None else 0, dtype=torch.float32)
    if rows:
        given = gradient, x, None if weight is None else weight.contiguous(), rstds, made, sums, rows
        named = {"WEIGHTED": weight is not None, "SUMMED": wanted is not None, "STEPS": steps}
        with torch.cuda.device_of(x):
            _backward[(programs,)](*given, width=width, **named, **_sizes(width))
    if wanted is None:
        return made, None
    total = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
    if rows:
        sizes = {"PROGRAMS": _PROGRAMS, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
        with torch.cuda.device_of(x):
            _add_up[(triton.cdiv(width, _COLUMNS),)](sums, total, programs, width=width, **sizes)
    return made, total


def _sizes(width: int) -> dict[str, int]:
    """Give the sizes of a program that holds a row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}
