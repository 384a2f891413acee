"""The operator ``autocastfx::quick_gelu``, ``x * sigmoid(1.702 * x)``, which computes in float32 and keeps its input.

torch has none. See :mod:`autocastfx.runtime.operators.rms_norm` for how it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["SLOPE", "quick_gelu"]

SLOPE = 1.702

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("quick_gelu(Tensor self) -> Tensor")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _QuickGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _without_autograd(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        wide, gradient = _wide(x), _wide(gradients[0])
        if torch.is_grad_enabled():  # to be differentiated again, which the operator below is not
            s = torch.sigmoid(SLOPE * wide)
            return (gradient * (s + SLOPE * wide * s * (1 - s))).to(x.dtype)
        # It is silu(1.702 * x) / 1.702, and so has the derivative of silu there.
        return torch.ops.aten.silu_backward(gradient, SLOPE * wide).to(x.dtype)


def _with_autograd(x: Tensor) -> Tensor:
    if torch._C._are_functorch_transforms_active():  # which take no autograd function here, but its parts
        return _without_autograd(x)
    return _QuickGELU.apply(x)


def _without_autograd(x: Tensor) -> Tensor:
    wide = _wide(x)
    return (wide * torch.sigmoid(SLOPE * wide)).to(x.dtype)


_LIBRARY.impl("quick_gelu", _with_autograd, "Autograd")
_LIBRARY.impl("quick_gelu", _without_autograd, "CompositeExplicitAutograd")

quick_gelu = torch.ops.autocastfx.quick_gelu.default
