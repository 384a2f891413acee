"""How far the elements of a float32 value reach."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["magnitude"]


def magnitude(found: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Largest finite magnitude of all float32 tensors in ``found``, and how many of their elements are not finite.

    Both are 0-d tensors on the tensors' device, so that nothing waits for an accelerator. None if there is no dense
    float32 tensor with elements.
    """
    reached = [
        _of(leaf.detach())
        for leaf in pytree.tree_leaves(found)
        if isinstance(leaf, torch.Tensor)
        and leaf.dtype == torch.float32
        and leaf.layout == torch.strided
        and leaf.numel()
        and not leaf.is_meta
    ]
    if not reached:
        return None
    largest, count = reached[0]
    for more, others in reached[1:]:
        largest, count = torch.maximum(largest, more), count + others
    return largest, count


def _of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = tensor.aminmax()
    if tensor.device.type == "cpu" and math.isfinite(float(low)) and math.isfinite(float(high)):
        return torch.maximum(-low, high), torch.zeros((), dtype=torch.int64)  # one pass, and nearly always enough
    finite = tensor.isfinite()
    low, high = tensor.where(finite, 0.0).aminmax()
    return torch.maximum(-low, high), (~finite).sum()
