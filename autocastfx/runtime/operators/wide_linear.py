"""The operator ``autocastfx::wide_linear``: a 16-bit linear layer whose weight and bias get float32 gradients.

The weight's gradient is a product that is added up in float32 anyway. Behind a cast weight it is rounded to 16 bits,
where it may overflow, and cast back; here it is written as it is. The bias's gradient is added up in float32, too, in
two stages. Forward, and the gradient of the input, are those of torch's ``linear`` of the 16-bit copies. So is all else
while compiling, under transforms of torch.func, with forward-mode derivatives, for tensors of other classes, and where
backward is differentiated again: the gradients then go through the copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from autocastfx.runtime.operators.casts import by_autograd, is_concrete, is_for_autograd, writable

ROWS_OF_STAGE = 64  # that the first stage adds up

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define(
    "wide_linear(Tensor input, Tensor weight, Tensor low_weight, Tensor? bias=None, Tensor? low_bias=None, "
    "bool transposed=False) -> Tensor"
)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        low_weight: Tensor,
        bias: Tensor | None,
        low_bias: Tensor | None,
        transposed: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, low_weight, low_bias)
        ctx.transposed = transposed
        return writable(_plain(x, weight, low_weight, bias, low_bias, transposed))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,), (x, low_weight, low_bias), wanted = gradients, ctx.saved_tensors, ctx.needs_input_grad
        if gradient is None:
            return (None,) * 6
        if is_for_autograd(gradient):
            compute = partial(_plain, x, low_weight, low_weight, low_bias, low_bias, ctx.transposed)
            low = (x, low_weight, low_bias)
            of_x, of_weight, of_bias = by_autograd(compute, low, (wanted[0], wanted[2], wanted[4]), gradient)
            return of_x, None, of_weight, None, of_bias, None
        of_x, of_weight, rows = None, None, gradient.reshape(-1, gradient.shape[-1])
        if wanted[0]:
            of_x = gradient @ (low_weight.mT if ctx.transposed else low_weight)
        if wanted[1]:
            of_rows = x.reshape(-1, x.shape[-1])
            left, right = (of_rows, rows) if ctx.transposed else (rows, of_rows)
            of_weight = _float32_product(left.mT, right)
        return of_x, of_weight, None, _float32_sum(rows) if wanted[3] else None, None, None


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda or left.is_meta:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _float32_sum(rows: Tensor) -> Tensor:
    """Return the sum of rows. More programs of a GPU run in a sum of parts, each of few rows."""
    if len(rows) > ROWS_OF_STAGE and len(rows) % ROWS_OF_STAGE == 0:
        rows = rows.unflatten(0, (-1, ROWS_OF_STAGE)).sum(1, dtype=torch.float32)
    return rows.sum(0, dtype=torch.float32)


def _plain(
    x: Tensor,
    weight: Tensor,
    low_weight: Tensor,
    bias: Tensor | None = None,
    low_bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """``x @ low_weight.mT + low_bias``; ``low_weight`` of the shape (inner, columns) if ``transposed``."""
    return torch.nn.functional.linear(x, low_weight.mT if transposed else low_weight, low_bias)


def _with_autograd(
    x: Tensor,
    weight: Tensor,
    low_weight: Tensor,
    bias: Tensor | None = None,
    low_bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    given = (x, weight, low_weight, bias, low_bias, transposed)
    is_other = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if is_other or not torch.is_grad_enabled() or not all(is_concrete(t) for t in given if isinstance(t, Tensor)):
        return _plain(*given)
    return _WideLinear.apply(*given)


_LIBRARY.impl("wide_linear", _with_autograd, "Autograd")
_LIBRARY.impl("wide_linear", _plain, "CompositeExplicitAutograd")
_LIBRARY.impl("wide_linear", _plain, "FuncTorchBatchedDecomposition")  # vmap

wide_linear = torch.ops.autocastfx.wide_linear.default
