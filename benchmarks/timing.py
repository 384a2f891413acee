"""Time several ways to do one thing in turns, so that other load on the machine affects all alike."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import quantiles

import torch

_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2  # malloc.h of glibc
_LARGE = 2**31 - 1


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, and return whether it does; for a CPU, with glibc.

    By default malloc gives large blocks back to the system and asks for them anew. Page faults then cost more than the
    work that is timed, and one tensor more or less decides whether they occur.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGE), (_TOP_PAD, 2**26))
    return all(libc.mallopt(key, value) == 1 for key, value in settings)


def milliseconds(work: Callable[[], object], device: str) -> float:
    """Time ``work``: CPU time of this thread, which other processes affect less; on a GPU wall time."""
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
    """Yield each name once per round, each round starting with another, with False in the first round (warm-up)."""
    for turn in range(rounds + 1):
        for place in range(len(names)):
            yield turn > 0, names[(turn + place) % len(names)]


def ratios(mine: Sequence[float], others: Sequence[float] | None) -> list[float]:
    """Return quartiles of the ratios of each round's time to the other side's; nothing without another side."""
    if others is None:
        return []
    return [round(quartile, 4) for quartile in quantiles([a / b for a, b in zip(mine, others, strict=True)], n=4)]


def timed(sides: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Return the milliseconds of each round, by side; the sides take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for is_counted, name in turns(list(sides), rounds):
        taken = milliseconds(sides[name], device)
        if is_counted:
            found[name].append(taken)
    return found


def spread(quartiles: Sequence[float], digits: int = 2) -> str:
    """Write a median with its quartiles."""
    low, middle, high = (f"{quartile:.{digits}f}" for quartile in quartiles)
    return f"{middle} ({low} to {high})"
