"""The operator ``autocastfx::layer_norm``: ``layer_norm`` of a 16-bit input with a float32 weight and bias.

On a CPU torch's kernel takes both and computes in float32, but adds up the gradients of weight and bias row by row in
16 bits, which loses most of a bias's gradient over thousands of rows. This operator has the same result. Its backward
adds these gradients up in float32: it widens input and gradient and calls the float32 kernel. Large inputs are widened
some rows at a time, and the gradient of the input then comes from the 16-bit kernel. On other devices, while compiling,
and under transforms of torch.func, forward widens the whole input. Inputs that are not 16-bit go to torch's
``layer_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.runtime.operators.eager import is_concrete

__all__ = ["compute_layer_norm", "layer_norm"]

aten: Any = torch.ops.aten
# Elements of the input widened at a time, per thread: with the gradient's, 2 MiB in float32, which fits a CPU's cache.
# Fewer take longer, because each part calls operators; more wait for memory.
_PER_THREAD = 2**18

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define(str(aten.layer_norm.default._schema).removeprefix("aten::"))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        result, mean, rstd = _normed(x, normalized_shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.normalized_shape, ctx.eps = normalized_shape, eps
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,), (x, weight, bias, mean, rstd) = gradients, ctx.saved_tensors
        if gradient is None:
            return (None,) * 5
        of_input, _, *of_parameters, _ = ctx.needs_input_grad
        wanted = of_input, *of_parameters
        norm = ctx.normalized_shape, mean, rstd, weight, bias
        if torch.is_grad_enabled() or is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient):
            found = _again(gradient, (x, weight, bias), ctx.normalized_shape, ctx.eps, wanted)
        elif _is_mixed(x) and x.numel() > _part():
            of_x, *_ = aten.native_layer_norm_backward(gradient, x, *norm, [wanted[0], False, False])
            found = [of_x, *_of_parameters(gradient, x, *norm, wanted=wanted[1:])]
        else:
            of_x, *others = aten.native_layer_norm_backward(gradient.float(), x.float(), *norm, wanted)
            found = [of_x.to(x.dtype) if wanted[0] else None, *others]
        return found[0], None, found[1], found[2], None


def _is_mixed(x: Tensor) -> bool:
    """True if torch's kernel takes a 16-bit ``x`` with float32 parameters: on a CPU, and not while compiling."""
    return x.is_cpu and is_concrete(x)


def _part() -> int:
    """Return the number of elements to widen at a time."""
    return _PER_THREAD * torch.get_num_threads()


def _normed(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result in 16 bits, and each row's mean and reciprocal standard deviation in float32."""
    if _is_mixed(x):
        return torch.native_layer_norm(x, normalized_shape, weight, bias, eps)
    result, mean, rstd = torch.native_layer_norm(x.float(), normalized_shape, weight, bias, eps)
    return result.to(x.dtype), mean, rstd


def _of_parameters(
    gradient: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ``wanted`` gradients of weight and bias, computed some rows at a time."""
    if not any(wanted):
        return None, None
    size = math.prod(normalized_shape)
    rows = max(1, _part() // size)
    each = (gradient.reshape(-1, size), x.reshape(-1, size), mean.reshape(-1, 1), rstd.reshape(-1, 1))
    wide = torch.empty((2, rows, size), dtype=torch.float32)
    found: list[Tensor | None] = [None, None]
    for some in zip(*(t.split(rows) for t in each), strict=True):
        read = [to[: len(narrow)].copy_(narrow) for to, narrow in zip(wide, some[:2], strict=True)]
        read = [t.view(-1, *normalized_shape) for t in read]
        norm = normalized_shape, *some[2:], weight, bias
        _, *sums = aten.native_layer_norm_backward(*read, *norm, [False, *wanted])
        found = [b if a is None else a.add_(b) for a, b in zip(found, sums, strict=True)]
    return found[0], found[1]


def _again(
    gradient: Tensor,
    given: tuple[Tensor, Tensor, Tensor | None],
    shape: Sequence[int],
    eps: float,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return the ``wanted`` gradients by autograd, differentiable again if gradients are enabled."""
    creates = torch.is_grad_enabled()
    x, *parameters = given
    with torch.enable_grad():
        result = _widened(x, shape, *parameters, eps)
    asked = [t for t, is_asked in zip(given, wanted, strict=True) if t is not None and is_asked]
    found = iter(torch.autograd.grad(result, asked, gradient, create_graph=creates))
    return [next(found) if is_asked else None for is_asked in wanted]


def _widened(x: Tensor, *rest: Any) -> Tensor:
    return _torch_layer_norm(x.float(), *rest).to(x.dtype)


def _torch_layer_norm(*given: Any) -> Tensor:
    found: Tensor = aten.layer_norm.default(*given)
    return found


def _parameters(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in float32. A missing weight becomes ones, or the kernel would keep 16-bit statistics."""
    given = x.new_ones(normalized_shape, dtype=torch.float32) if weight is None else _widened_parameter(weight)
    return given, bias if bias is None else _widened_parameter(bias)


def _widened_parameter(parameter: Tensor) -> Tensor:
    return parameter.float() if parameter.dtype in LOW_DTYPES else parameter


def compute_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute the operator with autograd, without torch's dispatcher.

    Args:
        x: of any floating dtype.
        normalized_shape: the last sizes of ``x``, and the sizes of weight and bias.
        weight: float32 for a 16-bit ``x``; a 16-bit weight is widened.
        bias: as ``weight``.
        eps: added to the variance.
        cudnn_enable: ignored, as by torch.

    Returns:
        A tensor of the shape and dtype of ``x``.
    """
    if x.dtype not in LOW_DTYPES:
        return _torch_layer_norm(x, normalized_shape, weight, bias, eps)
    given = x, normalized_shape, *_parameters(x, normalized_shape, weight, bias), eps
    if torch._C._are_functorch_transforms_active():  # which cannot take this autograd function
        return _widened(*given)
    if not torch.is_grad_enabled():
        return _normed(*given)[0]
    result: Tensor = _LayerNorm.apply(*given)
    return result


def _layer_norm_without_autograd(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    if x.dtype not in LOW_DTYPES:
        return _torch_layer_norm(x, normalized_shape, weight, bias, eps)
    return _normed(x, normalized_shape, *_parameters(x, normalized_shape, weight, bias), eps)[0]


_LIBRARY.impl("layer_norm", compute_layer_norm, "Autograd")
_LIBRARY.impl("layer_norm", _layer_norm_without_autograd, "CompositeExplicitAutograd")

layer_norm = torch.ops.autocastfx.layer_norm.default
