"""What a step did, read from the device when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autocastfx import gradients

__all__ = ["StepResult"]


@dataclass(frozen=True, eq=False)
class StepResult:
    """One step of a ``LossScalingOptimizer``.

    Each value waits for the device when it is first read; until then it costs nothing.
    """

    _found_inf: torch.Tensor
    _scale: torch.Tensor
    _norm: torch.Tensor | None
    _groups: Callable[[], Sequence[dict[str, Any]]]

    @cached_property
    def found_inf(self) -> bool:
        """Whether a gradient was not finite, in any process; False where the loss scale checks none."""
        return bool(self._found_inf.item())

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing."""
        return self.found_inf

    @cached_property
    def scale(self) -> float:
        """What the loss had been multiplied by."""
        return float(self._scale.item())

    @cached_property
    def grad_norm(self) -> float:
        """The 2-norm of the unscaled gradients; that of ``clip_grad_norm_``, before clipping, where it was called.

        Raises:
            LossScaleError: the gradients are gone.
        """
        return float((self._norm if self._norm is not None else gradients.norm(self._groups())).item())

    @cached_property
    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters of this process whose gradients were not finite.

        Raises:
            LossScaleError: the gradients are gone.
        """
        return gradients.culprits(self._groups())

    def __repr__(self) -> str:
        return f"StepResult(skipped={self.skipped}, scale={self.scale:g})"
