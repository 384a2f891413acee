"""The operator ``autocastfx::saturating_cast``, which narrows: what is beyond a bound becomes the bound, not infinite.

It takes float32, and a bound of at least 8192 that the dtype has. Infinities and NaN stay what they are. Its derivative
is that of a cast, so that backward keeps nothing; under transforms of torch.func it is that of its parts, which is 0
beyond the bound. See :mod:`autocastfx.runtime.operators.rms_norm` for how it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["saturating_cast"]

# This much of a float32 value is below 4, which a bound of 8192 or more does not feel once it is rounded to 16 bits; of
# an infinity it is infinite.
_TINY = 2.0**-126

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("saturating_cast(Tensor self, ScalarType dtype, float bound) -> Tensor")


class _SaturatingCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
        ctx.dtype, ctx.low = x.dtype, dtype
        return _without_autograd(x, dtype, bound)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return gradients[0].to(ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0].to(ctx.low)


def _with_autograd(x: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    if torch._C._are_functorch_transforms_active():  # which take no autograd function here, but its parts
        return _without_autograd(x, dtype, bound)
    return _SaturatingCast.apply(x, dtype, bound)


def _without_autograd(x: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    clamped = x.clamp(-bound, bound).add_(x.detach(), alpha=_TINY)  # a choice by isinf takes five times as long
    return clamped.to(dtype)


_LIBRARY.impl("saturating_cast", _with_autograd, "Autograd")
_LIBRARY.impl("saturating_cast", _without_autograd, "CompositeExplicitAutograd")

saturating_cast = torch.ops.autocastfx.saturating_cast.default
