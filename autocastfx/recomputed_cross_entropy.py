"""The operator ``autocastfx::cross_entropy_loss``: in float32, of 16-bit scores, which are all that it keeps of them.

torch keeps the float32 logarithms of all probabilities for backward: over a vocabulary, twice the bytes of the scores.
This one computes them again. Loss and gradients are those of the cross entropy of float32 scores, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["recomputed_cross_entropy"]

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_ARGUMENTS = "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, int ignore_index=-100"
_LIBRARY.define(f"cross_entropy_loss({_ARGUMENTS}) -> Tensor")


def _loss(scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    classes = min(scores.ndim, 2) - 1
    logarithms = torch.log_softmax(scores, classes, dtype=torch.float32)
    return torch.ops.aten.nll_loss_nd(logarithms, target, weight, reduction, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
        return _loss(scores, target, weight, reduction, ignore_index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, target, weight, ctx.reduction, ctx.ignore_index = inputs
        ctx.save_for_backward(scores, target, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        scores, target, weight = ctx.saved_tensors
        is_twice = torch.is_grad_enabled()  # it is to be differentiated again
        with torch.enable_grad():
            given = scores if is_twice else scores.detach().requires_grad_()
            loss = _loss(given, target, weight, ctx.reduction, ctx.ignore_index)
            (of_scores,) = torch.autograd.grad(loss, given, gradients[0], create_graph=is_twice)
        return of_scores, None, None, None, None


def _with_autograd(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    if torch._C._are_functorch_transforms_active() or not scores.requires_grad:
        return _loss(scores, target, weight, reduction, ignore_index)
    return _CrossEntropy.apply(scores, target, weight, reduction, ignore_index)


_LIBRARY.impl("cross_entropy_loss", _with_autograd, "Autograd")
_LIBRARY.impl("cross_entropy_loss", _loss, "CompositeExplicitAutograd")

recomputed_cross_entropy = torch.ops.autocastfx.cross_entropy_loss.default
