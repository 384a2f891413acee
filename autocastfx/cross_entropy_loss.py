"""The operator ``autocastfx::cross_entropy_loss``: the float32 cross entropy of 16-bit scores, without a copy of them.

torch's own widens all scores and keeps the float32 logarithms of all probabilities: over a vocabulary, twice the bytes
of the scores, and in backward three times as much at once. Of many scores this one keeps the scores alone, and computes
some rows at a time, in backward once more. Loss and gradient are torch's to the bit. Of fewer it computes what torch
does; or it keeps the logarithms rounded, as a model does that is 16-bit throughout, whose loss is rounded too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autocastfx.errors import UnsupportedError

__all__ = ["FEW", "cross_entropy_loss"]

aten: Any = torch.ops.aten
FEW = 2**22  # scores: 16 MiB in float32
_PART = {"cpu": 2**19}  # scores computed at a time, for each thread: 2 MiB in float32, which its cache holds
_LARGE_PART = 2**25  # on other devices, which want few and large kernels: 128 MiB
_NONE, _MEAN, _SUM = 0, 1, 2  # numbers of reductions, as torch has them
_IGNORED = -100

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_ARGUMENTS = "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, int ignore_index=-100"
_LIBRARY.define(f"cross_entropy_loss({_ARGUMENTS}, *, bool rounds=False) -> Tensor")


class _OfMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
        loss, total = _in_parts(scores, target, reduction, ignore_index)
        ctx.save_for_backward(scores, target, total)
        ctx.reduction, ctx.ignore_index = reduction, ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,), (scores, target, total) = gradients, ctx.saved_tensors
        options = (None, ctx.reduction, ctx.ignore_index)
        if torch.is_grad_enabled():  # to be differentiated once more
            loss = _as_torch(scores, target, *options)
            (of_scores,) = torch.autograd.grad(loss, scores, gradient, create_graph=True)
            return of_scores, None, None, None
        of_scores = torch.empty_like(scores)
        for rows in _parts(scores):
            of_loss = gradient[rows] if ctx.reduction == _NONE else gradient
            of_scores[rows] = _gradient(of_loss, _logarithms(scores[rows]), target[rows], *options, total)
        return of_scores, None, None, None


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, weight: Tensor | None, *options: int) -> Tensor:
        logarithms = _logarithms(scores)
        loss, total = _loss_and_total(logarithms, target, weight, *options)
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
            gradient, reduction = torch.div(gradient, total, out=logarithms.new_empty(())), _SUM
        weight = None if weight is None else weight.to(low)
        given = (target, weight, reduction, ctx.ignore_index, logarithms.new_empty(()))  # a total that only means read
        return _gradient(gradient.to(low), logarithms, *given), None, None, None, None


def _logarithms(scores: Tensor) -> Tensor:
    return torch.log_softmax(scores, min(scores.ndim, 2) - 1, dtype=torch.float32)


def _loss_and_total(logarithms: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The loss and the sum of the weights of all targets, by which a mean divides."""
    compute = aten.nll_loss_forward if logarithms.ndim == 2 else aten.nll_loss2d_forward
    found: tuple[Tensor, Tensor] = compute(logarithms, *given)
    return found


def _gradient(gradient: Tensor, logarithms: Tensor, *given: Any) -> Tensor:
    """That of the scores, in the dtype of ``logarithms``."""
    backward = aten.nll_loss_backward if logarithms.ndim == 2 else aten.nll_loss2d_backward
    of_logarithms = backward(gradient, logarithms, *given)
    found: Tensor = aten._log_softmax_backward_data(of_logarithms, logarithms, 1, logarithms.dtype)
    return found


def _parts(scores: Tensor) -> Iterator[slice]:
    """Slices of the first dimension, of as many scores as are computed at a time."""
    size = _PART[scores.device.type] * torch.get_num_threads() if scores.device.type in _PART else _LARGE_PART
    rows = max(1, size * len(scores) // scores.numel())
    return (slice(start, start + rows) for start in range(0, len(scores), rows))


def _in_parts(scores: Tensor, target: Tensor, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss and the number of targets; what rows give is added up as torch adds it, all at once."""
    losses = torch.empty(target.shape, dtype=torch.float32, device=scores.device)
    for rows in _parts(scores):
        losses[rows], _ = _loss_and_total(_logarithms(scores[rows]), target[rows], None, _NONE, ignore_index)
    if reduction == _NONE:
        return losses, losses.new_empty(())
    of_one_class = torch.where(target == ignore_index, _IGNORED, 0)
    return _loss_and_total(-losses.unsqueeze(1), of_one_class, None, reduction, _IGNORED)


def _as_torch(scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    loss: Tensor = aten.nll_loss_nd(_logarithms(scores), target, weight, reduction, ignore_index)
    return loss


def _is_taken(scores: Tensor) -> bool:
    """Whether these are rows of scores, or images."""
    return scores.ndim in (2, 4)


def _are_many(scores: Tensor, weight: Tensor | None) -> bool:
    """Whether these are computed in parts. A compiler and an exporter see one whole: parts would be all in a graph."""
    is_plain = type(scores) in (Tensor, FakeTensor) and isinstance(scores.numel(), int) and weight is None
    is_seen = torch.compiler.is_compiling() or get_proxy_mode() is not None
    return is_plain and not is_seen and _is_taken(scores) and scores.numel() > FEW


def _without_autograd(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = _IGNORED,
    *,
    rounds: bool = False,
) -> Tensor:
    if _are_many(scores, weight):
        return _in_parts(scores, target, reduction, ignore_index)[0]
    return _as_torch(scores, target, weight, reduction, ignore_index)


def _with_autograd(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = _IGNORED,
    *,
    rounds: bool = False,
) -> Tensor:
    options = reduction, ignore_index
    if torch._C._are_functorch_transforms_active():  # they take no autograd function here, but what torch computes
        return _as_torch(scores, target, weight, *options)
    if not (scores.requires_grad and torch.is_grad_enabled()):
        return _without_autograd(scores, target, weight, *options)
    if _are_many(scores, weight):
        loss: Tensor = _OfMany.apply(scores, target, *options)
    elif rounds and _is_taken(scores):
        loss = _Rounding.apply(scores, target, weight, *options)
    else:
        loss = _as_torch(scores, target, weight, *options)
    return loss


_LIBRARY.impl("cross_entropy_loss", _with_autograd, "Autograd")
_LIBRARY.impl("cross_entropy_loss", _without_autograd, "CompositeExplicitAutograd")

cross_entropy_loss = torch.ops.autocastfx.cross_entropy_loss.default
