"""The loss of a model's output, whose gradient is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from autocastfx.errors import SensitivityError

__all__ = ["Inputs", "LossFunction", "loss_of"]

LossFunction = Callable[[Any, Any], torch.Tensor]
Inputs = Callable[[Any], Any]


def loss_of(output: Any, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """Return the loss of a model's output.

    Raises:
        SensitivityError: it is no single number, or does not depend on anything that requires a gradient.
    """
    found: Any = _own_loss(output) if loss_fn is None else loss_fn(output, batch)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        asks = "give loss_fn(output, batch), which" if loss_fn is None else "loss_fn"
        raise SensitivityError(f"the loss is {kind}: {asks} returns one number, as a tensor.")
    if not found.requires_grad:
        raise SensitivityError(
            "the loss does not depend on anything that requires a gradient: compute it from the output without detach "
            "and no_grad."
        )
    return found.float().reshape(())


def _own_loss(output: Any) -> Any:
    if isinstance(output, Mapping) and "loss" in output:
        return cast("Mapping[str, Any]", output)["loss"]
    return cast("tuple[Any, ...]", output)[0] if isinstance(output, tuple) and output else output
