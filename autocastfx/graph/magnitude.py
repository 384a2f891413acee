"""How large the elements of a float32 value are: the largest, and the typical one."""

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
    """How large the finite elements of a value are.

    Attributes:
        largest: the largest magnitude.
        rms: the root mean square of those that are not 0. Of several tensors, or several batches, it is that of the one
            where it is largest. 0 if all elements are, or are below 1e-22 or so.
    """

    largest: float
    rms: float


class Measured(NamedTuple):
    """The numbers of a :class:`Magnitude`, and how many elements are not finite, as 0-d tensors on one device."""

    largest: torch.Tensor
    rms: torch.Tensor
    non_finite: torch.Tensor

    def magnitude(self) -> Magnitude:
        """As numbers. It waits for the device."""
        return Magnitude(float(self.largest), float(self.rms))


def magnitude(found: Any) -> Measured | None:
    """How large the elements of all float32 tensors in ``found`` are.

    Nothing waits for an accelerator. None if there is no dense float32 tensor with elements here: a fake one has none,
    and a distributed one has them elsewhere.
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
        # so that all are finite, as nearly always
        return Measured(torch.maximum(-low, high), _rms(tensor), torch.zeros((), dtype=torch.int64))
    is_finite = tensor.isfinite()
    finite = tensor.where(is_finite, 0.0)
    low, high = finite.aminmax()
    return Measured(torch.maximum(-low, high), _rms(finite), (~is_finite).sum())


def _rms(finite: torch.Tensor) -> torch.Tensor:
    # Squares below float32's range are 0, and those beyond it infinite: then this is as small or large as it can be.
    norm = torch.linalg.vector_norm(finite).clamp(max=torch.finfo(finite.dtype).max)
    return norm / torch.count_nonzero(finite).clamp(min=1).sqrt()
