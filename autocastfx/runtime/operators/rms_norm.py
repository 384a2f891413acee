"""The operator ``autocastfx::rms_norm``: torch's ``rms_norm``, but backward keeps little more than the inputs.

It computes in float32, also for a 16-bit input with a float32 weight, and rounds the result once.

On a CPU torch's own consists of several ops and keeps more tensors than the formula written out. This one keeps the
input, the weight and a float32 number per row. As an operator, graphs print, pickle and export it by name; its autograd
kernel calls torch's operators, so that torch.compile can fuse them.

On CUDA torch's own is one kernel (``aten::_fused_rms_norm``, computed in float32 inside) where input and weight are of
one dtype, and this operator calls it. For a 16-bit input with a float32 weight torch's consists of several ops there as
well, and warns of that: three Triton kernels take their place, where they are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.runtime.kernels.chosen import is_chosen
from autocastfx.runtime.operators.eager import is_concrete

__all__ = ["rms_norm"]

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
        if torch.is_grad_enabled() or is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient):
            return *_by_autograd(gradient, x, weight, ctx.eps, wanted), None
        of_x, of_weight = kernels.differentiate(gradient, x, weight, rstds, of_weight=wanted[1])
        return of_x if wanted[0] else None, of_weight, None


def _in_kernels(x: Tensor, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    from autocastfx.runtime.kernels import rms_norm as kernels  # where Triton is

    return kernels.normalize(x, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def _by_autograd(
    gradient: Tensor, x: Tensor, weight: Tensor | None, eps: float | None, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the ``wanted`` gradients of input and weight, differentiable again if gradients are enabled."""
    creates = torch.is_grad_enabled()
    with torch.enable_grad():
        result = _parts(x, [-1], weight, eps)[0]
    asked = [t for t, is_asked in zip((x, weight), wanted, strict=True) if t is not None and is_asked]
    found = iter(torch.autograd.grad(result, asked, gradient, create_graph=creates))
    return [next(found) if is_asked else None for is_asked in wanted]


def _has_own_kernel(x: Tensor, weight: Tensor | None) -> bool:
    """True for an eager input on CUDA whose weight has its dtype: torch's own kernel is the fastest there."""
    return x.is_cuda and is_concrete(x) and x.dtype in _DTYPES and weight is not None and weight.dtype == x.dtype


def _torch_rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    found: Tensor = aten.rms_norm(x, normalized_shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)
    return found


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
