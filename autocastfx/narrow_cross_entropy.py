"""The operator ``autocastfx::cross_entropy_loss``: a float32 loss of 16-bit scores, which keeps 16 bits for backward.

torch's own keeps the float32 logarithms of all probabilities: over a vocabulary, twice the bytes of the scores. This
one rounds them once the loss is computed, as a model keeps them that is 16-bit throughout, whose loss is rounded too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autocastfx.errors import UnsupportedError

__all__ = ["DIMENSIONS", "narrow_cross_entropy"]

aten: Any = torch.ops.aten
DIMENSIONS = (2, 4)  # of the scores that it takes: rows, or images
_MEAN, _SUM = 1, 2  # numbers of reductions, as torch has them

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_ARGUMENTS = "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, int ignore_index=-100"
_LIBRARY.define(f"cross_entropy_loss({_ARGUMENTS}) -> Tensor")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, weight: Tensor | None, *options: int) -> Tensor:
        logarithms = torch.log_softmax(scores, 1, dtype=torch.float32)
        compute = aten.nll_loss_forward if scores.ndim == 2 else aten.nll_loss2d_forward
        loss, total = compute(logarithms, target, weight, *options)
        ctx.save_for_backward(logarithms.to(scores.dtype), target, weight, total)
        ctx.reduction, ctx.ignore_index = options
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "with fold='kernel' a cross entropy keeps too little to be differentiated twice: convert the model "
                "with fold='exact', or call backward without create_graph=True."
            )
        logarithms, target, weight, total = ctx.saved_tensors
        gradient, reduction, low = gradients[0], ctx.reduction, logarithms.dtype
        if reduction == _MEAN:  # divided in float32, for the number of targets may have no 16 bits
            gradient, reduction = gradient / total, _SUM
        weight = None if weight is None else weight.to(low)
        backward = aten.nll_loss_backward if logarithms.ndim == 2 else aten.nll_loss2d_backward
        given = (target, weight, reduction, ctx.ignore_index, logarithms.new_empty(()))  # a total that only means read
        of_logarithms = backward(gradient.to(low), logarithms, *given)
        of_scores = aten._log_softmax_backward_data(of_logarithms, logarithms, 1, low)
        return of_scores, None, None, None, None


def _without_autograd(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100
) -> Tensor:
    logarithms = torch.log_softmax(scores, 1, dtype=torch.float32)
    return aten.nll_loss_nd(logarithms, target, weight, reduction, ignore_index)


def _with_autograd(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100
) -> Tensor:
    transforms = torch._C._are_functorch_transforms_active()  # they take no autograd function here, but its parts
    computed = _without_autograd if transforms else _CrossEntropy.apply
    return computed(scores, target, weight, reduction, ignore_index)


_LIBRARY.impl("cross_entropy_loss", _with_autograd, "Autograd")
_LIBRARY.impl("cross_entropy_loss", _without_autograd, "CompositeExplicitAutograd")

narrow_cross_entropy = torch.ops.autocastfx.cross_entropy_loss.default
