"""Count, on their device, which values of a node overflowed or underflowed, and find the largest magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = ["DeviceCounts", "ValueCounts", "count_values", "read_counts"]

# A magnitude's bits, read as an integer, grow with it: Inf follows the finite numbers, and NaN follows Inf.
_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class ValueCounts:
    """Counts of the elements of values.

    Attributes:
        elements: all of them.
        overflow: those that are Inf or NaN.
        underflow: see :func:`count_values`.
        largest: the largest finite magnitude; 0 if there is none.
    """

    elements: int = 0
    overflow: int = 0
    underflow: int = 0
    largest: float = 0.0

    def __add__(self, other: ValueCounts) -> ValueCounts:
        return ValueCounts(
            self.elements + other.elements,
            self.overflow + other.overflow,
            self.underflow + other.underflow,
            max(self.largest, other.largest),
        )


@dataclass(frozen=True)
class DeviceCounts:
    """Counts that may still be computed: ``numbers`` is int64 of shape (3,), ``largest`` float32 without dimensions."""

    elements: int
    numbers: torch.Tensor
    largest: torch.Tensor


@torch.no_grad()
def count_values(value: torch.Tensor, source: torch.Tensor | None = None) -> DeviceCounts | None:
    """Count the elements of ``value``; nothing waits for the device.

    With a ``source`` of the same shape, of which ``value`` is a cast, underflow counts the elements that are subnormal
    or zero in the dtype of ``value`` and not zero in ``source``. Without one, it counts the subnormal elements alone:
    a zero may be meant.

    Args:
        value: float16, bfloat16 or float32, of any shape.
        source: floating point.

    Returns:
        The counts; None for other dtypes, for layouts that are not strided, and for no elements.
    """
    integer = _INTEGERS.get(value.dtype)
    if integer is None or value.layout is not torch.strided or not value.numel():
        return None
    infinite, normal = _edges(value.dtype)
    bits = value.detach().view(integer) & torch.iinfo(integer).max
    nonzero = torch.count_nonzero(bits if source is None else source.detach())
    not_small = torch.count_nonzero(bits >= normal)
    top = bits.amax()
    if bits.device.type == "cpu" and int(top) < infinite:  # nothing waits to be asked there, and most values are finite
        finite = torch.tensor(value.numel())
    else:
        are_finite = bits < infinite
        finite, top = torch.count_nonzero(are_finite), torch.where(are_finite, bits, 0).amax()
    return DeviceCounts(value.numel(), torch.stack((finite, not_small, nonzero)), top.view(value.dtype).float())


@lru_cache
def _edges(dtype: torch.dtype) -> tuple[int, int]:
    """The bits of Inf and of the smallest normal number."""
    info = torch.finfo(dtype)
    infinite, normal = torch.tensor([torch.inf, info.tiny], dtype=dtype).view(_INTEGERS[dtype]).tolist()
    return infinite, normal


def read_counts(counts: Sequence[DeviceCounts]) -> list[ValueCounts]:
    """Read the counts, with one transfer from each device."""
    found: dict[int, ValueCounts] = {}
    for device in dict.fromkeys(one.numbers.device for one in counts):
        here = [one for one in counts if one.numbers.device == device]
        rows = torch.stack([torch.cat([one.numbers, one.largest.view(torch.int32).long()[None]]) for one in here]).cpu()
        largest = rows[:, 3].int().view(torch.float32).tolist()
        for one, (finite, normal, nonzero, _), top in zip(here, rows.tolist(), largest, strict=True):
            found[id(one)] = ValueCounts(one.elements, one.elements - finite, max(nonzero - normal, 0), top)
    return [found[id(one)] for one in counts]
