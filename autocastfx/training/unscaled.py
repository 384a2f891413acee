"""Gradients that are divided by the loss scale, until their step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autocastfx.training import gradients
from autocastfx.training.loss_scaler import LossScaler

__all__ = ["Unscaled", "unscale_"]

_ZERO, _ONE = torch.zeros(()), torch.ones(())


@dataclass(slots=True)
class Unscaled:
    """What is known of unscaled gradients.

    Attributes:
        found_inf: float32, no dimensions: 1 if one is not finite, in any process; else 0.
        scale: float32, no dimensions; what they were divided by.
        is_empty: whether no process has a gradient.
        norm: that was found by clipping them.
    """

    found_inf: torch.Tensor
    scale: torch.Tensor
    is_empty: bool = False
    norm: torch.Tensor | None = None


def unscale_(
    optimizer: Any, groups: list[dict[str, Any]], scaler: LossScaler, process_group: dist.ProcessGroup | str | None
) -> Unscaled:
    """Divide the gradients of ``groups``, those of ``optimizer``, by the scale, in place.

    Where nothing is scaled and checked, they are not looked at.

    Raises:
        LossScaleError: they do not have the present scale.
    """
    if not scaler.rule.is_checked:
        return Unscaled(_ZERO, _ONE)
    grads = gradients.present(groups)
    if grads:
        scaler.rounds.check(optimizer)
    scale = scaler.state(grads[0].device if grads else _ZERO.device).scale.clone()
    found_inf = torch.zeros_like(scale) if grads else torch.full_like(scale, -1)  # less than any found by others
    gradients.unscale_(grads, scale.reciprocal(), found_inf)
    gradients.agree(found_inf, process_group)
    if grads:
        return Unscaled(found_inf, scale)
    is_empty = bool(found_inf.item() < 0)
    return Unscaled(found_inf.clamp_(min=0), scale, is_empty)
