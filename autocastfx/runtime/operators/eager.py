"""Tell eager tensors, whose sizes operators may inspect, from tensors that are compiled, exported or traced."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["is_concrete"]


def is_concrete(tensor: Tensor) -> bool:
    """True for an eager tensor, whose sizes may be inspected; false while compiling, exporting or tracing."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and not torch.compiler.is_compiling() and get_proxy_mode() is None
