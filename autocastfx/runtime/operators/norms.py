"""The operators ``autocastfx::rms_norm`` and ``autocastfx::layer_norm``: norms that compute in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autocastfx.dtypes import LOW_DTYPES, widened
from autocastfx.runtime.kernels.chosen import is_chosen
from autocastfx.runtime.operators.casts import by_autograd, is_concrete, is_for_autograd

# The operator ``autocastfx::rms_norm``: torch's ``rms_norm``, but backward keeps little more than the inputs.
#
# It computes in float32, also for a 16-bit input with a float32 weight, and rounds the result once.
#
# On a CPU torch's own consists of several ops and keeps more tensors than the formula written out. This one keeps the
# input, the weight and a float32 number per row. As an operator, graphs print, pickle and export it by name; its
# autograd kernel calls torch's operators, so that torch.compile can fuse them.
#
# On CUDA torch's own is one kernel (``aten::_fused_rms_norm``, computed in float32 inside) where input and weight are
# of one dtype, and this operator calls it. For a 16-bit input with a float32 weight torch's consists of several ops
# there as well, and warns of that: three Triton kernels take their place, where they are chosen.

aten: Any = torch.ops.aten

_DTYPES = (*LOW_DTYPES, torch.float32)  # that the Triton kernels take
_WIDEST = 8192  # the longest row that they take: a program holds one, and spills registers with a longer one

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor")


def _dims(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _rstd(x: Tensor, dims: list[int], eps: float | None) -> Tensor:
    """Return one over the root mean square of each row of ``x``, which is float32 or float64."""
    return torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))


def _parts(x: Tensor, dims: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the result and ``_rstd``."""
    wide = _wide(x)
    rstd = _rstd(wide, dims, eps)
    result = wide * rstd
    return (result if weight is None else weight * result).to(x.dtype), rstd


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.eps = _dims(normalized_shape), eps
        result, rstd = _parts(x, ctx.dims, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if gradients[0] is None:
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        gradient = _wide(gradients[0])
        if torch.is_grad_enabled():  # create_graph=True: the saved rstd is detached from the input
            rstd = _rstd(_wide(x), ctx.dims, ctx.eps)
        normal, of_x, of_weight = x * rstd, None, None  # float32, as rstd is
        if ctx.needs_input_grad[0]:
            scaled = gradient if weight is None else gradient * weight
            of_x = (rstd * (scaled - normal * (scaled * normal).mean(ctx.dims, keepdim=True))).to(x.dtype)
        if weight is not None and ctx.needs_input_grad[2]:
            of_weight = (gradient * normal).sum_to_size(weight.shape).to(weight.dtype)
        return of_x, None, of_weight, None


class _InKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        result, rstds = _in_kernels(x, weight, eps)
        ctx.save_for_backward(x, weight, rstds)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        from autocastfx.runtime.kernels import rms_norm as kernels  # where Triton is

        (gradient,), (x, weight, rstds) = gradients, ctx.saved_tensors
        if gradient is None:
            return None, None, None
        wanted = ctx.needs_input_grad[:2]
        if is_for_autograd(gradient):
            return *by_autograd(partial(_row_norm, x, weight, ctx.eps), (x, weight), wanted, gradient), None
        of_x, of_weight = kernels.differentiate(gradient, x, weight, rstds, of_weight=wanted[1])
        return of_x if wanted[0] else None, of_weight, None


def _in_kernels(x: Tensor, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    from autocastfx.runtime.kernels import rms_norm as kernels  # where Triton is

    return kernels.normalize(x, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def _row_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    return _parts(x, [-1], weight, eps)[0]


def _has_own_kernel(x: Tensor, weight: Tensor | None) -> bool:
    """True for an eager input on CUDA whose weight has its dtype: torch's own kernel is the fastest there."""
    return x.is_cuda and is_concrete(x) and x.dtype in _DTYPES and weight is not None and weight.dtype == x.dtype


def _torch_rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    result: Tensor = aten.rms_norm(x, normalized_shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)
    return result


def _takes_kernels(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> bool:
    """True for an eager input where the Triton kernels are chosen, which take a row at a time."""
    if not (is_chosen("rms_norm", x) and is_concrete(x)):
        return False
    is_row = len(normalized_shape) == 1 and x.shape[-1:] == tuple(normalized_shape) and 0 < x.shape[-1] <= _WIDEST
    return is_row and x.dtype in _DTYPES and (weight is None or (weight.dtype in _DTYPES and is_concrete(weight)))


def _with_autograd(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if torch._C._are_functorch_transforms_active():  # which cannot take this autograd function
        return _parts(x, _dims(normalized_shape), weight, eps)[0]
    if _has_own_kernel(x, weight):
        return _torch_rms_norm(x, normalized_shape, weight, eps)
    if _takes_kernels(x, normalized_shape, weight):
        return _InKernels.apply(x, weight, eps)
    return _RMSNorm.apply(x, normalized_shape, weight, eps)


def _rms_norm_without_autograd(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if _has_own_kernel(x, weight):
        return _torch_rms_norm(x, normalized_shape, weight, eps)
    if _takes_kernels(x, normalized_shape, weight):
        return _in_kernels(x, weight, eps)[0]
    return _parts(x, _dims(normalized_shape), weight, eps)[0]


_LIBRARY.impl("rms_norm", _with_autograd, "Autograd")
_LIBRARY.impl("rms_norm", _rms_norm_without_autograd, "CompositeExplicitAutograd")

rms_norm = torch.ops.autocastfx.rms_norm.default


# The operator ``autocastfx::layer_norm``: ``layer_norm`` of a 16-bit input with a float32 weight and bias.
#
# On a CPU torch's kernel takes both and computes in float32, but adds up the gradients of weight and bias row by row
# in 16 bits, which loses most of a bias's gradient over thousands of rows. This operator has the same result. Its
# backward adds these gradients up in float32: it widens input and gradient and calls the float32 kernel. Large inputs
# are widened some rows at a time, and the gradient of the input then comes from the 16-bit kernel. On other devices,
# while compiling, and under transforms of torch.func, forward widens the whole input. Inputs that are not 16-bit go
# to torch's ``layer_norm``.

# Elements of the input widened at a time, per thread: with the gradient's, 2 MiB in float32, which fits a CPU's cache.
# Fewer take longer, because each part calls operators; more wait for memory.
_PER_THREAD = 2**18
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
        if is_for_autograd(gradient):
            compute = partial(_widened, x, ctx.normalized_shape, weight, bias, ctx.eps)
            results = by_autograd(compute, (x, weight, bias), wanted, gradient)
        elif _is_mixed(x) and x.numel() > _part():
            of_x, *_ = aten.native_layer_norm_backward(gradient, x, *norm, [wanted[0], False, False])
            results = [of_x, *_of_parameters(gradient, x, *norm, wanted=wanted[1:])]
        else:
            of_x, *others = aten.native_layer_norm_backward(gradient.float(), x.float(), *norm, wanted)
            results = [of_x.to(x.dtype) if wanted[0] else None, *others]
        return results[0], None, results[1], results[2], None


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
    totals: list[Tensor | None] = [None, None]
    for some in zip(*(t.split(rows) for t in each), strict=True):
        read = [to[: len(narrow)].copy_(narrow) for to, narrow in zip(wide, some[:2], strict=True)]
        read = [t.view(-1, *normalized_shape) for t in read]
        norm = normalized_shape, *some[2:], weight, bias
        _, *sums = aten.native_layer_norm_backward(*read, *norm, [False, *wanted])
        totals = [b if a is None else a.add_(b) for a, b in zip(totals, sums, strict=True)]
    return totals[0], totals[1]


def _widened(x: Tensor, *rest: Any) -> Tensor:
    return _torch_layer_norm(x.float(), *rest).to(x.dtype)


def _torch_layer_norm(*given: Any) -> Tensor:
    result: Tensor = aten.layer_norm.default(*given)
    return result


def _parameters(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in float32. A missing weight becomes ones, or the kernel would keep 16-bit statistics."""
    given = x.new_ones(normalized_shape, dtype=torch.float32) if weight is None else widened(weight)
    return given, bias if bias is None else widened(bias)


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
