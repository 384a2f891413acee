"""Count numbers by magnitude, in powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Exponents", "Margin", "Shares", "Tally"]

_BIAS, _BINS = 127, 256  # of float32's exponent
_ZEROS = _BINS  # the bin of zeros, after those of the exponents
# In float16 a magnitude below 2**-25 rounds to zero, below 2**-14 it is denormal, and from 2**16 on infinite.
_SMALLEST, _NORMAL, _END = -25, -14, 16


class Shares(NamedTuple):
    """The shares of nonzero finite numbers that become zero, denormal, normal or infinite in float16.

    They add up to 1; all are 0 if there are no numbers.
    """

    zero: float
    denormal: float
    normal: float
    infinite: float


@dataclass(frozen=True)
class Margin:
    """How far numbers are from float16's limits, in powers of two; below 0 they are beyond a limit.

    Attributes:
        loss_scale: by what the numbers are multiplied.
        largest, smallest: the exponents of the largest and the smallest number, without the scale; -127 stands for any
            below -126.
        to_infinite: by how many powers of two all may grow before the largest becomes infinite.
        to_denormal, to_zero: by how many they may shrink before the smallest becomes denormal, and zero.
    """

    loss_scale: float
    largest: int
    smallest: int
    to_infinite: int
    to_denormal: int
    to_zero: int

    def __str__(self) -> str:
        return (
            f"times 2**{shift_of(self.loss_scale)}: the largest, from 2**{self.largest}, are "
            f"{_away(self.to_infinite, 'infinity')}; the smallest, from 2**{self.smallest}, are "
            f"{_away(self.to_denormal, 'denormals')} and {_away(self.to_zero, 'zero')}"
        )


def _away(powers: int, limit: str) -> str:
    count = f"{abs(powers)} power{'s' if abs(powers) != 1 else ''} of two"
    return f"{count} away from {limit}" if powers >= 0 else f"{count} into {limit}"


@dataclass(frozen=True)
class Exponents:
    """Counts of numbers by magnitude.

    Attributes:
        counts: by exponent ``e``, the number of magnitudes from ``2**e`` up to ``2**(e + 1)``. Those below ``2**-126``
            are counted at -127.
        zeros: the number of zeros.
        non_finite: the number of Inf and NaN.
        largest: the largest finite magnitude.
    """

    counts: Mapping[int, int]
    zeros: int
    non_finite: int
    largest: float

    @property
    def total(self) -> int:
        """The number of finite numbers other than zero."""
        return sum(self.counts.values())

    def shares(self, loss_scale: float = 1.0) -> Shares:
        """Return the shares in float16 of the numbers times ``loss_scale``.

        Raises:
            ValueError: ``loss_scale`` is not a power of two; numbers are counted by powers of two.
        """
        shift, total = shift_of(loss_scale), max(self.total, 1)

        def share(low: float, high: float) -> float:
            return sum(n for e, n in self.counts.items() if low <= e + shift < high) / total

        return Shares(
            zero=share(-math.inf, _SMALLEST),
            denormal=share(_SMALLEST, _NORMAL),
            normal=share(_NORMAL, _END),
            infinite=share(_END, math.inf),
        )

    def margin(self, loss_scale: float = 1.0) -> Margin | None:
        """Return how far the numbers times ``loss_scale`` are from float16's limits; None if all are zero.

        Raises:
            ValueError: ``loss_scale`` is not a power of two.
        """
        shift = shift_of(loss_scale)
        if not self.counts:
            return None
        largest, smallest = max(self.counts), min(self.counts)
        low = smallest + shift
        return Margin(loss_scale, largest, smallest, _END - 1 - largest - shift, low - _NORMAL, low - _SMALLEST)

    def __add__(self, other: Exponents) -> Exponents:
        exponents = sorted({*self.counts, *other.counts})
        return Exponents(
            {e: self.counts.get(e, 0) + other.counts.get(e, 0) for e in exponents},
            self.zeros + other.zeros,
            self.non_finite + other.non_finite,
            max(self.largest, other.largest),
        )


NOTHING = Exponents({}, 0, 0, 0.0)


def shift_of(loss_scale: float) -> int:
    """Return the exponent of ``loss_scale``.

    Raises:
        ValueError: ``loss_scale`` is not a power of two.
    """
    mantissa, exponent = math.frexp(loss_scale) if math.isfinite(loss_scale) else (0.0, 0)
    if mantissa != 0.5:
        raise ValueError(
            f"loss_scale is a power of two here, such as 2.0**16, not {loss_scale!r}: gradients are "
            "counted by powers of two."
        )
    return exponent - 1


class Tally:
    """Counts numbers on their device, in constant memory. Nothing waits for the device until ``read_all``."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=device)
        self.largest = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, numbers: torch.Tensor, factor: torch.Tensor | None = None) -> None:
        """Count ``numbers`` (floating, dense) times ``factor`` (float32, no dimensions), in float32."""
        if not numbers.numel():
            return
        wide = numbers.detach().float().abs()
        if factor is not None:
            wide = wide * factor
        exponents = wide.contiguous().view(torch.int32) >> 23
        zeros = (wide == 0).sum()
        self.counts[:_BINS] += _counted(exponents)
        self.counts[0] -= zeros
        self.counts[_ZEROS] += zeros
        self.largest.copy_(torch.maximum(self.largest, wide.where(wide.isfinite(), 0.0).amax()))


def _counted(exponents: torch.Tensor) -> torch.Tensor:
    if exponents.is_cuda:  # there bincount waits for the device
        return torch.histc(exponents, bins=_BINS, min=0, max=_BINS).to(torch.int64)
    return torch.bincount(exponents.flatten(), minlength=_BINS)


def read_all(tallies: list[Tally]) -> list[Exponents]:
    """Read all counts from their devices, with two reads per device."""
    found: dict[int, Exponents] = {}
    for device in dict.fromkeys(t.counts.device for t in tallies):
        here = [t for t in tallies if t.counts.device == device]
        counts: list[list[int]] = torch.stack([t.counts for t in here]).tolist()
        largest: list[float] = torch.stack([t.largest for t in here]).tolist()
        for tally, row, reached in zip(here, counts, largest, strict=True):
            found[id(tally)] = Exponents(
                counts={e - _BIAS: n for e, n in enumerate(row[: _BINS - 1]) if n},
                zeros=row[_ZEROS],
                non_finite=row[_BINS - 1],
                largest=reached,
            )
    return [found[id(tally)] for tally in tallies]
