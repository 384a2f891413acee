"""The time that an op takes at least: that of its operations at peak rate, or that of its bytes if that is longer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autocastfx.report.lint.gpu import Gpu
from autocastfx.report.lint.work import Work

__all__ = ["Bound", "Total", "bound", "limit", "total"]


@dataclass(frozen=True)
class Bound:
    """One op on one GPU.

    Attributes:
        seconds: max(FLOP / peak, bytes / bandwidth).
        intensity: FLOP a byte; 0 for an op that moves nothing.
        balance: FLOP a byte of the GPU, at the rate for this op's dtype.
    """

    seconds: float
    intensity: float
    balance: float

    @property
    def by(self) -> str:
        """What takes the time: ``"memory"`` or ``"compute"``."""
        return "compute" if self.intensity > self.balance else "memory"


@dataclass(frozen=True)
class Total:
    """Seconds of all ops of a graph, and of those that tensor cores can run: matrix products and convolutions."""

    seconds: float
    in_products: float

    @property
    def share(self) -> float:
        """Share of the time in products; 0 of nothing."""
        return self.in_products / self.seconds if self.seconds else 0.0


def bound(work: Work, gpu: Gpu) -> Bound:
    """The least time of ``work``. Uncounted operations count as none."""
    flops = work.flops or 0
    seconds = max(flops / gpu.peak(tensor_cores=work.low), work.bytes / gpu.bandwidth)
    return Bound(seconds, flops / work.bytes if work.bytes else 0.0, gpu.balance(tensor_cores=work.low))


def total(works: Iterable[Work], gpu: Gpu) -> Total:
    """The times of all ``works``, added up."""
    times = [(bound(work, gpu).seconds, bool(work.flops)) for work in works]
    return Total(sum(seconds for seconds, _ in times), sum(seconds for seconds, product in times if product))


def limit(share: float, speedup: float) -> float:
    """Amdahl's law: the speed-up of the whole if ``share`` of its time becomes ``speedup`` times as fast.

    ``speedup`` may be infinite; the result is, if the share is all of it.
    """
    left = 1 - share + share / speedup
    return 1 / left if left else float("inf")
