"""Roofline model: an op takes at least the time of its FLOP at peak rate, and of its bytes at full bandwidth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autocastfx.report.lint.gpu import Gpu
from autocastfx.report.lint.work import Work

__all__ = ["Bound", "Total", "bound", "limit", "total"]


@dataclass(frozen=True)
class Bound:
    """The least time of an op on a GPU.

    Attributes:
        seconds: max(FLOP / peak, bytes / bandwidth).
        intensity: the op's FLOP per byte; 0 for an op that moves nothing.
        balance: the GPU's FLOP per byte, at the peak rate for the op's dtype.
    """

    seconds: float
    intensity: float
    balance: float

    @property
    def by(self) -> str:
        """The bound of the time: ``"memory"`` or ``"compute"``."""
        return "compute" if self.intensity > self.balance else "memory"


@dataclass(frozen=True)
class Total:
    """The least time, in seconds, of all ops of a graph, and of its matrix products and convolutions."""

    seconds: float
    in_products: float

    @property
    def share(self) -> float:
        """The products' share of the time; 0 if there is no time."""
        return self.in_products / self.seconds if self.seconds else 0.0


def bound(work: Work, gpu: Gpu) -> Bound:
    """Compute the least time of ``work``. Operations that were not counted are taken as 0."""
    flops = work.flops or 0
    seconds = max(flops / gpu.peak(tensor_cores=work.low), work.bytes / gpu.bandwidth)
    return Bound(seconds, flops / work.bytes if work.bytes else 0.0, gpu.balance(tensor_cores=work.low))


def total(works: Iterable[Work], gpu: Gpu) -> Total:
    """Add up the least times of all ``works``."""
    times = [(bound(work, gpu).seconds, bool(work.flops)) for work in works]
    return Total(sum(seconds for seconds, _ in times), sum(seconds for seconds, product in times if product))


def limit(share: float, speedup: float) -> float:
    """Return the speed-up of the whole, by Amdahl's law, if ``share`` of its time becomes ``speedup`` times as fast.

    ``speedup`` may be infinite; if ``share`` is then 1, the result is infinite.
    """
    left = 1 - share + share / speedup
    return 1 / left if left else float("inf")
