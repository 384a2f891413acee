"""Warn of an optimizer that steps by gradients of a float16 loss that nothing has scaled: small ones are 0."""

from __future__ import annotations

import functools
import sys
import warnings
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autocastfx.errors import UnscaledStepWarning

_HAVE_STEPPED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # float16 models that are trained
_SCALE = ("torch.amp.", "autocastfx.training.", "apex.", "deepspeed.")  # the code of these divides by a loss scale


def watch_first_step(model: nn.Module) -> None:
    """Look at the first step with parameters of ``model``, which runs in float16 and is called in training."""
    _watch_steps()
    _HAVE_STEPPED.setdefault(model, False)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_look_at_step)  # for good: removing it in a step would break that step


def _look_at_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or all(_HAVE_STEPPED.values()):
        return
    learning = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    waiting = [model for model, has_stepped in _HAVE_STEPPED.items() if not has_stepped]
    stepping = [model for model in waiting if not learning.isdisjoint(model.parameters())]
    _HAVE_STEPPED.update(dict.fromkeys(stepping, True))
    if stepping and not _is_scaled(sys._getframe(1)):
        warnings.warn(
            f"{type(optimizer).__name__} steps by gradients of an unscaled float16 loss, of which small ones are 0: "
            "wrap it in an autocastfx.LossScalingOptimizer, let a GradScaler step, or use bfloat16. Told once for a "
            "model; where you scale the loss yourself, ignore UnscaledStepWarning.",
            UnscaledStepWarning,
            stacklevel=3,
        )


def _is_scaled(frame: FrameType | None) -> bool:
    """True if code that scales losses makes the step."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_SCALE):
            scaler: Any = frame.f_locals.get("self")
            return not isinstance(scaler, torch.amp.GradScaler) or scaler.is_enabled()
        frame = frame.f_back
    return False
