"""Refuse derivatives that a model's forward takes itself: a graph captured by torch.export cannot hold them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autocastfx.capture.call_rules import Rule
from autocastfx.errors import CaptureError

__all__ = ["DERIVATIVES"]


def _refuse(take: Any, *args: Any, **kwargs: Any) -> Any:
    if get_proxy_mode() is None:  # inside a call that stays whole
        return take(*args, **kwargs)
    raise CaptureError(
        "the model's forward takes a derivative (torch.autograd.grad, torch.autograd.backward, Tensor.backward, or "
        "torch.func.grad, vjp, jacrev or hessian), which a graph of torch.export cannot hold. Convert in place, with "
        "autocastfx.enable, or convert the part whose derivative it takes."
    )


DERIVATIVES: Mapping[Any, Rule] = {
    take: partial(_refuse, take) for take in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
}
