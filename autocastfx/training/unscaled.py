"""Divide gradients by the loss scale, and keep the findings until the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autocastfx.training import gradients
from autocastfx.training.agreement import Agreeing, agree
from autocastfx.training.loss_scaler import LossScaler

__all__ = ["Unscaled", "unscale_"]

_ZERO, _ONE = torch.zeros(()), torch.ones(())


@dataclass(slots=True)
class Unscaled:
    """Findings about unscaled gradients.

    Attributes:
        found_inf: float32, no dimensions: 1 if a gradient is not finite in any process, else 0.
        scale: float32, no dimensions; the scale that they were divided by.
        is_empty: True if no process has a gradient.
        norm: their norm before clipping; None if they were not clipped by norm.
    """

    found_inf: torch.Tensor
    scale: torch.Tensor
    is_empty: bool = False
    norm: torch.Tensor | None = None


def unscale_(optimizer: Any, groups: list[dict[str, Any]], scaler: LossScaler, process_group: Agreeing) -> Unscaled:
    """Divide the gradients of ``groups`` by the scale in place. Does nothing if the scale checks no gradients.

    Raises:
        LossScaleError: the gradients do not have the scale's present value.
    """
    if not scaler.rule.is_checked:
        return Unscaled(_ZERO, _ONE)
    optimizer.change.warn("call optimizer.clip_grad_norm_, or optimizer.unscale_() before you clip")
    grads = gradients.present(groups)
    if grads:
        scaler.rounds.check(optimizer)
    scale = scaler.state(grads[0].device if grads else _ZERO.device).scale.clone()
    found_inf = torch.zeros_like(scale) if grads else torch.full_like(scale, -1)  # less than any found by others
    gradients.unscale_(grads, scale.reciprocal(), found_inf)
    agree(found_inf, process_group, groups)
    if grads:
        return Unscaled(found_inf, scale)
    is_empty = bool(found_inf.item() < 0)
    return Unscaled(found_inf.clamp_(min=0), scale, is_empty)
