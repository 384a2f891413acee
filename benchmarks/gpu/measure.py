"""Time the sides of a training step in turns, on a GPU by CUDA events, and note the kernels that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.gpu.stage import Rounds, Row
from benchmarks.timing import milliseconds, ratios, turns

__all__ = ["Times", "Work", "elapsed", "interleaved", "kernels", "peak", "said", "timed"]

ATTENTION = ("flash", "fmha", "cutlass", "efficient", "math", "attention", "softmax")


@dataclass(frozen=True)
class Work:
    """Timed parts of a side, by name. Before each ``prepare`` runs, after it ``clear``; neither is timed."""

    parts: Mapping[str, Callable[[], object]]
    prepare: Callable[[], object] = lambda: None
    clear: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Times:
    """Milliseconds of each round, by side and part; and the sides that failed, with why."""

    found: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])
    failed: dict[str, str] = field(default_factory=dict[str, str])


def said(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def elapsed(work: Callable[[], object], device: str) -> float:
    """Return the milliseconds of ``work``: between CUDA events, or CPU time of this thread."""
    if device != "cuda":
        return milliseconds(work, device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(sides: Mapping[str, Work], rounds: Rounds, device: str) -> Times:
    """Time all parts of each side in each round; a side that fails takes part no more."""
    times = Times({side: {part: [] for part in work.parts} for side, work in sides.items()})
    ends = time.monotonic() + rounds.seconds
    for number, (is_counted, side) in enumerate(turns(list(sides), rounds.most)):
        turn, place = divmod(number, len(sides))
        if place == 0 and turn > rounds.least and time.monotonic() > ends:
            break
        if side in times.failed:
            continue
        try:
            taken = _round(sides[side], device, 1 if is_counted else rounds.warm_up)
        except Exception as error:  # of this side; it becomes a row
            times.failed[side] = said(error)
            continue
        if is_counted:
            for part, spent in taken.items():
                times.found[side][part].append(spent)
    return times


def _round(work: Work, device: str, repeats: int) -> dict[str, float]:
    taken: dict[str, float] = {}
    for _ in range(repeats):
        for name, part in work.parts.items():
            work.prepare()
            taken[name] = elapsed(part, device)
            work.clear()
    return taken


def timed(times: Times, baseline: str, called: str = "autocast") -> dict[str, Row]:
    """Return by side the medians in milliseconds, and quartiles of the ratios to ``baseline`` in the same round.

    ``called`` is the baseline's name in the row.
    """
    rows: dict[str, Row] = {}
    for side, parts in times.found.items():
        if side in times.failed:
            rows[side] = {"error": times.failed[side]}
            continue
        other = times.found.get(baseline, {}) if baseline not in times.failed else {}
        rows[side] = {"rounds": len(next(iter(parts.values())))}
        for part, spent in parts.items():
            rows[side][f"{part}_ms"] = round(median(spent), 4)
            rows[side][f"{part}_quartiles"] = [round(quartile, 4) for quartile in quantiles(spent, n=4)]
            rows[side][f"{part}_to_{called}"] = ratios(spent, other.get(part))
    return rows


def peak(work: Callable[[], object]) -> int:
    """Return the most bytes that ``work`` allocates at one time, beyond what was allocated before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernels(work: Callable[[], object], most: int = 12) -> Row:
    """Run ``work`` once, and return its number of kernels, those of attention by name, and those that take longest."""
    profile: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with profile as profiler:
        work()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [e for e in profiler.key_averages() if e.device_type == on_device and e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "kernels": sum(event.count for event in events),
        "kernels_ms": round(sum(event.self_device_time_total for event in events) / 1e3, 3),
        "attention": {e.key[:120]: e.count for e in events if any(word in e.key.lower() for word in ATTENTION)},
        "longest": {e.key[:120]: round(e.self_device_time_total / 1e3, 3) for e in events[:most]},
    }
