"""The operator ``autocastfx::rms_norm``: that of torch, of which a backward keeps only what it was given.

Beside a 16-bit input it takes a float32 weight as it is: all is computed in float32, and the result is rounded once.

On a CPU torch computes its own in parts and keeps more of them than a model that writes them out. This one keeps the
input, the weight and a float32 number for each row. It is an operator because graphs print, pickle and export those by
name; its autograd kernel runs on torch's operators, so that torch.compile sees these and may fuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["rms_norm"]

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor")


def _dims(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _rstd(x: Tensor, dims: list[int], eps: float | None) -> Tensor:
    """One over the root of the mean square of each row of ``x``, which has at least float32."""
    return torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))


def _parts(x: Tensor, dims: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """The result and ``_rstd``."""
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
        if torch.is_grad_enabled():  # to be differentiated again: what was kept is no function of the input
            rstd = _rstd(_wide(x), ctx.dims, ctx.eps)
        normal, of_x, of_weight = x * rstd, None, None  # float32, as rstd is
        if ctx.needs_input_grad[0]:
            scaled = gradient if weight is None else gradient * weight
            of_x = (rstd * (scaled - normal * (scaled * normal).mean(ctx.dims, keepdim=True))).to(x.dtype)
        if weight is not None and ctx.needs_input_grad[2]:
            of_weight = (gradient * normal).sum_to_size(weight.shape).to(weight.dtype)
        return of_x, None, of_weight, None


def _with_autograd(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if torch._C._are_functorch_transforms_active():  # which take no autograd function here, but its parts
        return _without_autograd(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, normalized_shape, weight, eps)


def _without_autograd(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _parts(x, _dims(normalized_shape), weight, eps)[0]


_LIBRARY.impl("rms_norm", _with_autograd, "Autograd")
_LIBRARY.impl("rms_norm", _without_autograd, "CompositeExplicitAutograd")

rms_norm = torch.ops.autocastfx.rms_norm.default
