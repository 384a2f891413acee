"""Copies of a model to check its conversion in place: as it is, as Dynamo captures it, and enabled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from autocastfx.capture.leave_intact import modes_after
from autocastfx.errors import CaptureError, UnsupportedError
from autocastfx.runtime.behaviour import compare_calls, trials_of


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy that is not enabled and shares the parameters and buffers of ``model``.

    Raises:
        UnsupportedError: the model cannot be copied.
    """
    tensors = (*model.parameters(), *model.buffers())
    try:
        return copy.deepcopy(model, {id(one): one for one in tensors})
    except Exception as error:  # whatever the model's attributes raise
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied, and an enabled model is checked on copies: {error}"
        ) from error


def check_capture(model: nn.Module, capture: Callable[[nn.Module], nn.Module], arguments: Any) -> None:
    """Compare what Dynamo captures of a model, without casts, with the model; it stays as it is.

    ``capture`` enables a model so that it runs what is captured.

    Raises:
        CaptureError: it does something else, or nothing could be compared.
        UnsupportedError: the model cannot be copied.
    """
    modes = [modes_after(model, training=training) for training in (True, False)]
    bare = capture(plain_copy(model))
    compared = compare_calls(plain_copy(model), bare, trials_of(arguments, modes))
    if not compared.calls:
        raise CaptureError(f"check= could compare no call: {'; '.join(compared.dropped)}. Give other inputs.")
    if compared.differences:
        first, *rest = compared.differences
        more = f", and {len(rest)} more differences" if rest else ""
        raise CaptureError(
            f"what torch.compile captures of {type(model).__name__} does not do what the model does: {first}{more}. "
            "The model is not enabled; without check= it would be."
        )
