"""Times of several ways to do one thing, taken in turns, so that what else the machine does falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles

import torch

__all__ = ["milliseconds", "ratios", "turns"]


def milliseconds(work: Callable[[], object], device: str) -> float:
    """What ``work`` takes: CPU time of this thread, which other processes lengthen less; on a GPU wall time."""
    if device == "cuda":
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)
    started = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - started)


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[bool, str]]:
    """Each name once in each round, which begins with another each time; and whether it counts: not in the first."""
    for turn in range(rounds + 1):
        for place in range(len(names)):
            yield turn > 0, names[(turn + place) % len(names)]


def ratios(mine: Sequence[float], others: Sequence[float] | None) -> list[float]:
    """Quartiles of what each round's time is to that of the other side; nothing if there is no other."""
    if others is None:
        return []
    return [round(quartile, 4) for quartile in quantiles([a / b for a, b in zip(mine, others, strict=True)], n=4)]
