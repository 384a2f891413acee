"""Notice that gradients are changed while they are still scaled, as when they are clipped too early."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist

from autocastfx.errors import ScaledGradientsWarning

__all__ = ["ScaledChange"]


class ScaledChange:
    """Watches one gradient, from the backward pass that adds to it until gradients are unscaled.

    What clips, clips all gradients, so one is enough. A gradient that was replaced is not noticed. Where processes
    train together none is watched, because they average gradients in place.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._watched = next((p for p in parameters if p.requires_grad and p.is_leaf), None)
        self._seen: tuple[int, int] | None = None
        if self._watched is not None:
            see = weakref.WeakMethod(self._see)

            def note(parameter: torch.Tensor) -> None:
                alive = see()
                if alive is not None:
                    alive(parameter)

            weakref.finalize(self, self._watched.register_post_accumulate_grad_hook(note).remove)

    def _see(self, parameter: torch.Tensor) -> None:
        self._seen = _version(parameter)

    def warn(self, remedy: str) -> None:
        """Warn if the gradient was changed in place since it was computed. Call it before gradients are unscaled."""
        seen, self._seen = self._seen, None
        if seen is None or self._watched is None or (dist.is_available() and dist.is_initialized()):
            return
        now = _version(self._watched)
        if now is not None and now[0] == seen[0] and now[1] != seen[1]:
            warnings.warn(
                "gradients were changed while they were multiplied by the loss scale. If they were clipped, the limit "
                f"was too small by that factor: {remedy}. If they were divided by a number, all is well.",
                ScaledGradientsWarning,
                stacklevel=4,
            )


def _version(parameter: torch.Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided:
        return None
    return grad.data_ptr(), grad._version
