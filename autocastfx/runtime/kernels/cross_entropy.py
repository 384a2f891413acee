"""The cross entropy of rows over a vocabulary, in two Triton kernels that read each score twice.

Scores are widened as they are loaded, everything is computed in float32, and gradients are rounded once, at the store.
Forward takes the maximum and the sum of exponentials in one pass (Milakov & Gimelshein 2018, "Online normalizer
calculation for softmax"), and keeps one number a row.
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

_BLOCK = 4096  # the most scores that a program holds at a time


@triton.jit
def _forward(
    scores, row_stride, column_stride, targets, losses, logarithms, marks, ignored,
    classes: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = scores + row * row_stride
    largest, total = -float("inf"), 0.0
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = columns < classes
        values = tl.load(own + columns * column_stride, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(values, 0))
        # Without a finite score yet, a difference of infinities would be NaN.
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), 0)
        largest = new
    logarithm = largest + tl.log(total)
    target = tl.load(targets + row).to(tl.int64)
    is_counted = target != ignored
    is_class = (target >= 0) & (target < classes)
    score = tl.load(own + target * column_stride, mask=is_counted & is_class, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(is_counted, logarithm - score, 0.0))
    tl.store(logarithms + row, logarithm)
    # The sum of these is the number of targets, and NaN if one is no class.
    tl.store(marks + row, tl.where(is_counted, tl.where(is_class, 1.0, float("nan")), 0.0))


@triton.jit
def _backward(
    scores, row_stride, column_stride, targets, logarithms, gradients, gradient_stride, made, ignored,
    classes: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = columns < classes
    target = tl.load(targets + row).to(tl.int64)
    values = tl.load(scores + row * row_stride + columns * column_stride, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(values - tl.load(logarithms + row))
    gradient = tl.load(gradients + row * gradient_stride).to(tl.float32)
    result = (share - tl.where(columns == target, 1.0, 0.0)) * gradient
    result = tl.where(target == ignored, 0.0, result)
    tl.store(made + row * classes + columns, result.to(made.dtype.element_ty), mask=inside)


def row_losses(scores: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of each row.

    Args:
        scores: rows of scores, one for each class, of any strides: float16, bfloat16 or float32.
        target: the class of each row, whole numbers; ``ignore_index`` for a row that is not counted.
        ignore_index: may be a class too.

    Returns:
        Three float32 tensors of a number for each row. The loss, 0 where a row is not counted; the logarithm of the
        sum of exponentials, which backward reads; and 1 for a row that counts, 0 for another, NaN where the target is
        no class.
    """
    rows, classes = scores.shape
    losses, logarithms, marks = (torch.empty(rows, dtype=torch.float32, device=scores.device) for _ in range(3))
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(classes))
        given = scores, *scores.stride(), target.contiguous(), losses, logarithms, marks, ignore_index
        with torch.cuda.device_of(scores):  # Triton launches on the current device
            _forward[(rows,)](*given, classes=classes, BLOCK=block, num_warps=8)
    return losses, logarithms, marks


def differentiate(gradient: Tensor, scores: Tensor, target: Tensor, logarithms: Tensor, ignore_index: int) -> Tensor:
    """Compute the gradient of the scores from those of the row losses.

    Args:
        gradient: of each row's loss, float32; may be expanded from one number.
        scores: as for :func:`row_losses`, as are ``target`` and ``ignore_index``.
        target: see above.
        logarithms: the second result of :func:`row_losses`.
        ignore_index: see above.

    Returns:
        A contiguous tensor of the shape and dtype of ``scores``; 0 where a row is not counted.
    """
    rows, classes = scores.shape
    made = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(classes))
        given = scores, *scores.stride(), target.contiguous(), logarithms, gradient, gradient.stride(0), made
        with torch.cuda.device_of(scores):
            _backward[(rows, triton.cdiv(classes, block))](
                *given, ignore_index, classes=classes, BLOCK=block, num_warps=8
            )
    return made
