"""The operator ``autocastfx::cross_entropy_loss``: the float32 cross entropy of 16-bit scores, with less memory.

torch's own widens all scores and keeps float32 log-probabilities, twice the bytes of the scores; its backward holds
three such tensors at once. Over a vocabulary this operator keeps only the scores, computes some rows at a time, and
recomputes them in backward. Loss and gradient are those of the widened scores, on a CPU to the bit. For other scores it
computes as torch does, or, with ``rounds``, keeps the log-probabilities rounded to 16 bits, as a 16-bit model does.

On CUDA two Triton kernels take the place of the parts, where they are chosen: they add up in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.errors import UnsupportedError
from autocastfx.runtime.kernels.chosen import is_chosen
from autocastfx.runtime.operators.casts import by_autograd, is_concrete, is_for_autograd

aten: Any = torch.ops.aten
_CLASSES = 1024  # the fewest classes of a vocabulary: with shorter rows, parts cost more time than they save
# Scores computed at a time: on a CPU 2 MiB in float32 per thread, which fits its cache; 64 MiB on other devices, which
# need few and large kernels.
_PER_THREAD, _PER_KERNEL = 2**19, 2**24
_PARTS = 8  # with fewer parts, splitting is not worth it
_ROUNDED = 2**18  # scores from which keeping rounded log-probabilities is worth it
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of the reductions
_IGNORED = -100

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_ARGUMENTS = "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, int ignore_index=-100"
_LIBRARY.define(f"cross_entropy_loss({_ARGUMENTS}, *, bool rounds=False, bool recomputes=True) -> Tensor")


class _InParts(torch.autograd.Function):
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
        if is_for_autograd(gradient):
            return *_by_autograd(gradient, scores, target, *options), None, None, None
        total = gradient.new_empty(()) if total is None else total  # not read without a reduction
        of_scores = torch.empty_like(scores)
        for rows in _parts(scores):
            of_loss = gradient[rows] if ctx.reduction == _NONE else gradient
            of_scores[rows] = _gradient(of_loss, _undifferentiated(scores[rows]), target[rows], *options, total)
        return of_scores, None, None, None


class _InKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
        loss, logarithms, total = _in_kernels(scores, target, reduction, ignore_index)
        ctx.save_for_backward(scores, target, logarithms, total)
        ctx.reduction, ctx.ignore_index = reduction, ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        from autocastfx.runtime.kernels import cross_entropy  # where Triton is

        (gradient,), (scores, target, logarithms, total) = gradients, ctx.saved_tensors
        if is_for_autograd(gradient):
            given = (target, None, ctx.reduction, ctx.ignore_index)
            return *_by_autograd(gradient, scores, *given), None, None, None
        of_losses = (gradient / total if ctx.reduction == _MEAN else gradient).expand(len(scores))
        return cross_entropy.differentiate(of_losses, scores, target, logarithms, ctx.ignore_index), None, None, None


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
        logarithms = _undifferentiated(scores)
        loss, total = _loss_and_total(logarithms, target, None, reduction, ignore_index)
        ctx.save_for_backward(logarithms.to(scores.dtype), target, total)
        ctx.reduction, ctx.ignore_index = reduction, ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "with fold='kernel' a cross entropy keeps too little to be differentiated twice: convert the model "
                "with fold='exact', or call backward without create_graph=True."
            )
        logarithms, target, total = ctx.saved_tensors
        gradient, reduction = gradients[0], ctx.reduction
        if reduction == _MEAN:  # divided in float32, because 16 bits may not hold the number of targets
            gradient, reduction = gradient / total, _SUM
        unused = logarithms.new_empty(())  # in place of the number of targets, which a sum does not divide by
        given = (target, None, reduction, ctx.ignore_index, unused)
        return _gradient(gradient.to(logarithms.dtype), logarithms, *given), None, None, None


def _by_autograd(gradient: Tensor, scores: Tensor, *given: Any) -> list[Tensor | None]:
    return by_autograd(partial(_as_torch, scores, *given), [scores], [True], gradient)


def _logarithms(scores: Tensor) -> Tensor:
    return torch.log_softmax(scores, _dimension(scores), dtype=torch.float32)


def _undifferentiated(scores: Tensor) -> Tensor:
    """Do as ``_logarithms`` without autograd. On a CPU it overwrites the widened scores, to halve the memory."""
    if not (is_concrete(scores) and scores.is_cpu):
        return _logarithms(scores)
    widened = scores.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    logarithms: Tensor = aten._log_softmax.out(widened, _dimension(scores), False, out=widened)
    return logarithms


def _dimension(scores: Tensor) -> int:
    """Return the dimension of the classes."""
    return min(scores.ndim, 2) - 1


def _loss_and_total(logarithms: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the loss, and the sum of the weights of all targets, by which a mean divides."""
    compute = aten.nll_loss_forward if logarithms.ndim == 2 else aten.nll_loss2d_forward
    loss_and_total: tuple[Tensor, Tensor] = compute(logarithms, *given)
    return loss_and_total


def _gradient(gradient: Tensor, logarithms: Tensor, *given: Any) -> Tensor:
    """Return the gradient of the scores, in the dtype of ``logarithms``."""
    backward = aten.nll_loss_backward if logarithms.ndim == 2 else aten.nll_loss2d_backward
    of_logarithms = backward(gradient, logarithms, *given)
    of_scores: Tensor = aten._log_softmax_backward_data(of_logarithms, logarithms, 1, logarithms.dtype)
    return of_scores


def _part(device: torch.device) -> int:
    """Return the number of scores to compute at a time."""
    return _PER_THREAD * torch.get_num_threads() if device.type == "cpu" else _PER_KERNEL


def _parts(scores: Tensor) -> Iterator[slice]:
    """Split the rows into slices, one for each part."""
    rows = max(1, _part(scores.device) // scores.shape[1])
    return (slice(start, start + rows) for start in range(0, len(scores), rows))


def _in_parts(scores: Tensor, target: Tensor, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Return the loss and the number of targets. Row losses are reduced all at once, in torch's order."""
    losses = torch.empty(target.shape, dtype=torch.float32, device=scores.device)
    for rows in _parts(scores):
        losses[rows], _ = _loss_and_total(_undifferentiated(scores[rows]), target[rows], None, _NONE, ignore_index)
    if reduction == _NONE:
        return losses, None
    of_one_class = torch.where(target.long() == ignore_index, _IGNORED, 0)
    return _loss_and_total(-losses.unsqueeze(1), of_one_class, None, reduction, _IGNORED)


def _in_kernels(scores: Tensor, target: Tensor, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, what backward reads of each row, and the number of targets."""
    from autocastfx.runtime.kernels import cross_entropy  # where Triton is

    losses, logarithms, marks = cross_entropy.row_losses(scores, target, ignore_index)
    total = marks.sum()
    aten._assert_async.msg(~total.isnan(), "cross_entropy_loss: a target is no class")
    if reduction == _NONE:
        return losses, logarithms, total
    loss = losses.sum()
    return loss / total if reduction == _MEAN else loss, logarithms, total


def _as_torch(scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    loss: Tensor = aten.nll_loss_nd(_logarithms(scores), target, weight, reduction, ignore_index)
    return loss


def _is_long(scores: Tensor, target: Tensor) -> bool:
    """True for enough rows over a vocabulary to split; false while tracing, where a graph would hold every part."""
    if not is_concrete(scores):
        return False
    return _is_vocabulary(scores, target) and scores.numel() > _PARTS * _part(scores.device)


def _is_vocabulary(scores: Tensor, target: Tensor) -> bool:
    return scores.ndim == 2 and target.shape == scores.shape[:1] and scores.shape[1] >= _CLASSES


def _takes_kernels(scores: Tensor, target: Tensor) -> bool:
    """True for eager rows over a vocabulary where the Triton kernels are chosen."""
    is_right = is_chosen("cross_entropy_loss", scores) and is_concrete(scores) and _is_vocabulary(scores, target)
    return is_right and scores.dtype in (*LOW_DTYPES, torch.float32)


def _is_short(scores: Tensor) -> bool:
    """True for so few scores that rounding the log-probabilities costs more time than it saves."""
    return is_concrete(scores) and scores.numel() < _ROUNDED


def _without_autograd(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = _IGNORED,
    *,
    rounds: bool = False,
    recomputes: bool = True,
) -> Tensor:
    if weight is None and _takes_kernels(scores, target):
        return _in_kernels(scores, target, reduction, ignore_index)[0]
    if weight is None and _is_long(scores, target):
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
    recomputes: bool = True,
) -> Tensor:
    options = reduction, ignore_index
    if torch._C._are_functorch_transforms_active():  # which cannot take the autograd functions here
        return _as_torch(scores, target, weight, *options)
    if not (scores.requires_grad and torch.is_grad_enabled()):
        return _without_autograd(scores, target, weight, *options)
    if recomputes and weight is None and _takes_kernels(scores, target):
        loss: Tensor = _InKernels.apply(scores, target, *options)
    elif recomputes and weight is None and _is_long(scores, target):
        loss = _InParts.apply(scores, target, *options)
    elif rounds and weight is None and scores.ndim in (2, 4) and not _is_short(scores):
        loss = _Rounding.apply(scores, target, *options)
    else:
        loss = _as_torch(scores, target, weight, *options)
    return loss


_LIBRARY.impl("cross_entropy_loss", _with_autograd, "Autograd")
_LIBRARY.impl("cross_entropy_loss", _without_autograd, "CompositeExplicitAutograd")

cross_entropy_loss = torch.ops.autocastfx.cross_entropy_loss.default
