"""Whether a tensor is what it seems: an operator that looks at sizes may do so then alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["is_concrete"]


def is_concrete(tensor: Tensor) -> bool:
    """Whether sizes may be looked at. Compilers, exporters and abstract tensors see the same for all."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and not torch.compiler.is_compiling() and get_proxy_mode() is None
