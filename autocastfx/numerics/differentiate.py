"""Differentiate with torch so that the derivatives can be differentiated again, and again in float32."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["NotDifferentiableError", "derivable", "differentiated", "gradients_again"]


class NotDifferentiableError(RuntimeError):
    """An op has no derivative of its derivative."""


@contextmanager
def derivable() -> Generator[None]:
    """While open, torch runs in float32, with gradients, and takes kernels whose gradients can be differentiated.

    Attention takes its formula, and recurrent layers no cuDNN.
    """
    modes: Sequence[AbstractContextManager[Any]] = (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C._DisableAutocast(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    )
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def gradients_again(
    roots: Sequence[torch.Tensor], by: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of ``roots``, each weighed with its ``given``, by tensors. They can be differentiated.

    Raises:
        NotDifferentiableError: an op's gradient is computed in a way that cannot.
    """
    with derivable():
        try:
            return torch.autograd.grad(roots, by, cast("Any", given), create_graph=True, allow_unused=True)
        except RuntimeError as error:  # of a custom op, as one that computes into out=
            raise _not_differentiable(error) from error


def differentiated(
    roots: Sequence[torch.Tensor], by: Sequence[torch.Tensor], given: Sequence[torch.Tensor], *, again: bool
) -> Sequence[torch.Tensor | None]:
    """Return the derivatives of ``roots``, each weighed with its ``given``, by tensors. They have none themselves.

    Raises:
        NotDifferentiableError: an op's derivative has none.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        try:
            return torch.autograd.grad(roots, by, given, retain_graph=again, allow_unused=True)
        except RuntimeError as error:  # "derivative for aten::... is not implemented"
            raise _not_differentiable(error) from error


def _not_differentiable(error: RuntimeError) -> NotDifferentiableError:
    return NotDifferentiableError(next(iter(str(error).splitlines()), ""))
