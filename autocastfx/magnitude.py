"""How far the elements of a float32 value reach."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["is_here", "magnitude"]


def magnitude(found: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Largest finite magnitude of all float32 tensors in ``found``, and how many of their elements are not finite.

    Both are 0-d tensors on the tensors' device, so that nothing waits for an accelerator. None if there is no dense
    float32 tensor with elements here: a fake one has none, and a distributed one has them elsewhere.
    """
    leaves = (leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))
    reached = [_of(leaf.detach()) for leaf in leaves if leaf.dtype == torch.float32 and leaf.numel() and is_here(leaf)]
    if not reached:
        return None
    largest, count = reached[0]
    for more, others in reached[1:]:
        largest, count = torch.maximum(largest, more), count + others
    return largest, count


def is_here(tensor: torch.Tensor) -> bool:
    """True for a dense tensor with values in this process."""
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta


def _of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = tensor.aminmax()
    if tensor.device.type == "cpu" and math.isfinite(float(low)) and math.isfinite(float(high)):
        return torch.maximum(-low, high), torch.zeros((), dtype=torch.int64)  # one pass, and nearly always enough
    finite = tensor.isfinite()
    low, high = tensor.where(finite, 0.0).aminmax()
    return torch.maximum(-low, high), (~finite).sum()
