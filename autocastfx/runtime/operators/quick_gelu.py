"""The operator ``autocastfx::quick_gelu``, ``x * sigmoid(1.702 * x)``: computes in float32, saves only its input.

torch has no such operator. :mod:`autocastfx.runtime.operators.norms` says how these operators are made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
        if torch.is_grad_enabled():  # create_graph=True: silu_backward below is not differentiable
            s = torch.sigmoid(SLOPE * wide)
            return (gradient * (s + SLOPE * wide * s * (1 - s))).to(x.dtype)
        # The formula is silu(1.702 * x) / 1.702, so its derivative is silu's at 1.702 * x.
        return torch.ops.aten.silu_backward(gradient, SLOPE * wide).to(x.dtype)


def _with_autograd(x: Tensor) -> Tensor:
    if torch._C._are_functorch_transforms_active():  # which cannot take this autograd function
        return _without_autograd(x)
    return _QuickGELU.apply(x)


def _without_autograd(x: Tensor) -> Tensor:
    wide = _wide(x)
    return (wide * torch.sigmoid(SLOPE * wide)).to(x.dtype)


_LIBRARY.impl("quick_gelu", _with_autograd, "Autograd")
_LIBRARY.impl("quick_gelu", _without_autograd, "CompositeExplicitAutograd")

quick_gelu = torch.ops.autocastfx.quick_gelu.default
