"""Converted models with the pages that show them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import autocastfx
from autocastfx.capture.call import CallSignature


@dataclass(frozen=True)
class Shown:
    """A model and the page that shows it."""

    amp_model: autocastfx.AmpModule
    path: Path


def in_its_mode(model: nn.Module, ids: torch.Tensor) -> autocastfx.AmpModule:
    """Converted for the model's present mode alone, which takes half the time. Nothing is recomposed: more nodes."""
    amp_model = autocastfx.convert(model, dtype=torch.bfloat16, recompose=False)
    call, modes = CallSignature.of(model.forward).bind((ids,), {}), tuple(m.training for m in model.modules())
    amp_model._mounted.capture(call, modes, amp_model._held())
    return amp_model
