"""Measure the largest and the typical magnitude of a float32 value's elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Magnitude", "Measured", "is_here", "magnitude"]


@dataclass(frozen=True)
class Magnitude:
    """The magnitudes of a value's finite elements.

    Attributes:
        largest: the largest magnitude.
        rms: the root mean square of the elements that are not 0; over several tensors or batches, the largest such
            figure. 0 if all elements are 0, or smaller than about 1e-22.
    """

    largest: float
    rms: float


class Measured(NamedTuple):
    """A :class:`Magnitude` and the number of non-finite elements, as 0-d tensors on one device."""

    largest: torch.Tensor
    rms: torch.Tensor
    non_finite: torch.Tensor

    def magnitude(self) -> Magnitude:
        """Read the numbers. Waits for the device."""
        return Magnitude(float(self.largest), float(self.rms))


def magnitude(found: Any) -> Measured | None:
    """Measure all float32 tensors in ``found`` without waiting for an accelerator.

    Returns None if there is no dense float32 tensor with elements in this process; fake and distributed tensors do not
    count.
    """
    leaves = (leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))
    reached = [_of(leaf.detach()) for leaf in leaves if leaf.dtype == torch.float32 and leaf.numel() and is_here(leaf)]
    if not reached:
        return None
    first, *others = reached
    for more in others:
        largest, rms = torch.maximum(first.largest, more.largest), torch.maximum(first.rms, more.rms)
        first = Measured(largest, rms, first.non_finite + more.non_finite)
    return first


def is_here(tensor: torch.Tensor) -> bool:
    """True for a dense tensor with values in this process."""
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta


def _of(tensor: torch.Tensor) -> Measured:
    low, high = tensor.aminmax()
    if tensor.device.type == "cpu" and math.isfinite(float(low)) and math.isfinite(float(high)):
        # nearly always: then all elements are finite
        return Measured(torch.maximum(-low, high), _rms(tensor), torch.zeros((), dtype=torch.int64))
    is_finite = tensor.isfinite()
    finite = tensor.where(is_finite, 0.0)
    low, high = finite.aminmax()
    return Measured(torch.maximum(-low, high), _rms(finite), (~is_finite).sum())


def _rms(finite: torch.Tensor) -> torch.Tensor:
    # Squares that underflow count as 0; a norm that overflows is limited to float32's largest number.
    norm = torch.linalg.vector_norm(finite).clamp(max=torch.finfo(finite.dtype).max)
    return norm / torch.count_nonzero(finite).clamp(min=1).sqrt()
