"""The result of an optimizer step, read from the device on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autocastfx.errors import LossScaleError
from autocastfx.training import gradients
from autocastfx.training.host_copy import is_capturing
from autocastfx.training.unscaled import Unscaled

__all__ = ["GradientsOf", "StepResult", "exhausted", "overflowed"]


@dataclass(frozen=True)
class GradientsOf:
    """The parameter groups of a step, available while they still hold that step's gradients.

    Attributes:
        groups: the optimizer's groups.
        are_still: returns True while the gradients are those of the step.
    """

    groups: Sequence[dict[str, Any]]
    are_still: Callable[[], bool]

    def __call__(self) -> Sequence[dict[str, Any]]:
        """Return the groups.

        Raises:
            LossScaleError: the step's gradients are gone.
        """
        has_any = any(p.grad is not None for group in self.groups for p in group["params"])
        if not has_any or not self.are_still():
            raise LossScaleError(
                "the gradients of that step are gone: read last_step.grad_norm and last_step.culprits before "
                "zero_grad() and the next loss, or call clip_grad_norm_ before step(), whose norm is kept."
            )
        return self.groups


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step of ``LossScalingOptimizer``. Only reading a value waits for the device."""

    _unscaled: Unscaled
    _groups: GradientsOf

    @property  # not cached: the replay of a CUDA graph that holds the step makes them anew
    def found_inf(self) -> bool:
        """True if a gradient was not finite in any process; False if the loss scale checks no gradients."""
        return bool(self._unscaled.found_inf.item())

    @property
    def skipped(self) -> bool:
        """True if the step was skipped and changed nothing."""
        return self.found_inf

    @property
    def scale(self) -> float:
        """The factor by which the loss had been multiplied."""
        return float(self._unscaled.scale.item())

    @cached_property
    def grad_norm(self) -> float:
        """The 2-norm of the unscaled gradients; after ``clip_grad_norm_``, the norm that it returned.

        Raises:
            LossScaleError: the step's gradients are gone.
        """
        norm = self._unscaled.norm
        return float((norm if norm is not None else gradients.norm(self._groups())).item())

    @cached_property
    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters of this process whose gradients were not finite.

        Raises:
            LossScaleError: the step's gradients are gone.
        """
        return gradients.culprits(self._groups())

    def __repr__(self) -> str:
        return f"StepResult(skipped={self.skipped}, scale={self.scale:g})"


def exhausted(groups: Sequence[dict[str, Any]], scale: float) -> LossScaleError:
    """Make the error for a step that overflowed at the smallest scale."""
    names = gradients.culprits(groups)
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    where = f"of {shown}" if names else "of another process's parameters"
    return LossScaleError(
        f"the gradients {where} are not finite, and the loss scale is at its floor ({scale:g}) already: scaling is not "
        "the cause. The step was skipped and no weight changed. Look for Inf or NaN in the data, the loss and these "
        "parameters, lower the learning rate, or use bfloat16."
    )


def overflowed(found_inf: torch.Tensor) -> bool:
    """Ask the device whether gradients overflowed: ``found_inf`` is a float32 scalar, above 0 if they did.

    Raises:
        LossScaleError: a CUDA graph is being captured, which cannot ask.
    """
    if is_capturing(found_inf):
        raise LossScaleError(
            "whether to skip this step would be decided by the host, which a CUDA graph cannot ask. Use a fused "
            "optimizer (fused=True), and capture after a step that was not skipped (optimizer.last_step.skipped): the "
            "optimizer makes its state in the first one."
        )
    return bool(found_inf.item())
