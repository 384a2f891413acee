"""The changing state of a loss scale, as tensors on a device and as numbers in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autocastfx.errors import LossScaleError

__all__ = ["ScaleNumbers", "ScaleState"]

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass
class ScaleState:
    """The state of a loss scale: tensors without dimensions on one device, updated in place.

    Attributes:
        scale: float32; the factor of losses.
        good_steps: int32; steps without overflow since the scale last changed.
        spare: int32; overflows until the scale backs off.
        found: float32; 1 if a step overflowed since a shared scale was last updated, else 0.
    """

    scale: torch.Tensor
    good_steps: torch.Tensor
    spare: torch.Tensor
    found: torch.Tensor

    def to(self, device: torch.device) -> ScaleState:
        """Copy the state to ``device``."""
        return ScaleState(*(held.to(device) for held in (self.scale, self.good_steps, self.spare, self.found)))

    def fill(self, numbers: ScaleNumbers) -> None:
        """Set the state to ``numbers``."""
        self.scale.fill_(numbers.scale)
        self.good_steps.fill_(numbers.good_steps)
        self.spare.fill_(numbers.spare)
        self.found.zero_()


@dataclass(frozen=True)
class ScaleNumbers:
    """The numbers of a ``ScaleState``, as a checkpoint holds them."""

    scale: float
    good_steps: int
    spare: int

    @staticmethod
    def of(saved: Mapping[str, Any], *, spare: int) -> ScaleNumbers:
        """Read the state dict of a loss scale, or of a ``torch.amp.GradScaler``, which has no ``spare``.

        Raises:
            LossScaleError: ``saved`` is neither, or a number is out of range.
        """
        scale, good_steps = saved.get("scale"), saved.get("good_steps", saved.get("_growth_tracker"))
        if scale is None or good_steps is None:
            raise LossScaleError(
                "a loss scale's state has 'scale' and 'good_steps' (a GradScaler's '_growth_tracker'), this one has "
                f"{sorted(saved)}: give it what LossScalingOptimizer.state_dict() or GradScaler.state_dict() gave."
            )
        if not (isinstance(scale, (int, float)) and _SMALLEST <= scale <= _LARGEST):
            raise LossScaleError(
                f"a loss scale is a positive finite number, in float32 too, and the state holds {scale!r}: load the "
                "state without it."
            )
        counts = {"good_steps": good_steps, "spare": saved.get("spare", spare)}
        for name, count in counts.items():
            if not isinstance(count, int) or count < 0:
                raise LossScaleError(
                    f"{name!r} of a loss scale's state is a whole number of at least 0, not {count!r}: load the state "
                    "without it."
                )
        return ScaleNumbers(float(scale), **counts)
