"""Measure the deviation of 16-bit values from float32 values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from autocastfx.dtypes import dtype_name

__all__ = ["Deviation"]

_PIECE = 1 << 20  # elements


@dataclass(frozen=True)
class Deviation:
    """The deviation of values from float32 values.

    Attributes:
        dtype: the values' dtypes, joined by commas.
        error: the distance in the 2-norm, relative to the norm of the float32 values, over the elements that are finite
            in both; infinite if float32 has finite elements and all of them are Inf or NaN. Masks are left out:
            elements of half ``dtype``'s largest number, for float32 values beyond its range.
        overflow: share of elements that are Inf or NaN where float32 is finite.
        underflow: share of elements that are zero or denormal in ``dtype`` where float32 is neither.
        zeros: share of elements that are zero where float32 is not.
        nan: share of elements that are NaN where float32 is not.
    """

    dtype: str
    error: float
    overflow: float
    underflow: float
    zeros: float
    nan: float

    @property
    def severity(self) -> float:
        """The rank of the values: the error, or infinite if they overflowed."""
        return math.inf if self.overflow or self.nan else self.error

    @classmethod
    def of(cls, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Deviation:
        """Measure the deviation of ``ours`` from ``theirs``, tensors of the same number and shapes."""
        sums = sum(_sums(a, b) for pair in zip(ours, theirs, strict=True) for a, b in _parts(*pair))
        far, norm, finite, overflow, underflow, zeros, nan = torch.as_tensor(sums).tolist()
        count = max(sum(t.numel() for t in ours), 1)
        is_lost = overflow and overflow == finite
        error = math.inf if is_lost or (far and not norm) else math.sqrt(far / norm) if norm else 0.0
        dtype = ",".join(dict.fromkeys(dtype_name(t.dtype) for t in ours))
        return cls(dtype, error, overflow / count, underflow / count, zeros / count, nan / count)


def _parts(ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split both into pieces, because the computation takes several times their memory."""
    pieces = (_strided(tensor).reshape(-1).split(_PIECE) for tensor in (ours, theirs))
    return zip(*pieces, strict=True)


def _sums(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the squared norms of distance and reference, and how many finite values the reference has.

    Then come the counts of overflows, underflows, zeros and NaN.
    """
    ours = ours.to(theirs.device)
    finite, expected = ours.isfinite(), theirs.isfinite()
    largest, zero = torch.finfo(ours.dtype).max, torch.zeros((), dtype=torch.float64, device=theirs.device)
    both = finite & expected & ~((theirs.abs() > largest) & (ours * theirs.sign() == largest / 2))
    wide = torch.where(both, theirs.double(), zero)
    distance = torch.where(both, ours.double(), zero) - wide
    small = (ours.abs() < torch.finfo(ours.dtype).tiny) & (theirs.abs() >= torch.finfo(theirs.dtype).tiny)
    counts = (expected, expected & ~finite, small, (ours == 0) & (theirs != 0), ours.isnan() & ~theirs.isnan())
    return torch.stack([distance.square().sum(), wide.square().sum(), *(c.sum().double() for c in counts)])


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
