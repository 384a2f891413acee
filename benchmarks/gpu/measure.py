"""Time the sides of a training step in turns, on a GPU by CUDA events, and note the kernels that run."""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.gpu.stage import Rounds, Row
from benchmarks.timing import ratios

ATTENTION = ("flash", "fmha", "cudnn", "cutlass", "efficient", "math", "attention", "softmax", "sdpa")
_OWN = {"cuda": "device", "cpu": "cpu"}  # what the profiler calls a device's own time


@dataclass(frozen=True)
class Work:
    """Parts of a side, run in this order; each is timed from the first one's start to its own end.

    Before them ``prepare`` runs, after them ``clear``; neither is timed.
    """

    parts: Mapping[str, Callable[[], object]]
    prepare: Callable[[], object] = lambda: None
    clear: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Times:
    """Milliseconds of each round, by side and part; and the sides that failed, with why."""

    spent: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])
    failed: dict[str, str] = field(default_factory=dict[str, str])


def failure(error: BaseException) -> str:
    """Print the traceback, for log.txt, and return the error as one line."""
    traceback.print_exception(error)
    return said(error)


def said(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def settle() -> None:
    """Leave what is alive, imported modules and graphs above all, out of later garbage collections, which take long."""
    gc.collect()
    gc.freeze()


def release() -> None:
    """Give memory that nothing uses back to the device, so that the next side may have it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def elapsed(parts: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Run the parts, and return the milliseconds from the start to each one's end.

    They are those between CUDA events, or CPU time of this thread.
    """
    if device != "cuda":
        started, spent = time.thread_time(), dict[str, float]()
        for name, part in parts.items():
            part()
            spent[name] = 1e3 * (time.thread_time() - started)
        return spent
    torch.cuda.synchronize()
    start: Any = torch.cuda.Event(enable_timing=True)
    ends: dict[str, Any] = {name: torch.cuda.Event(enable_timing=True) for name in parts}
    start.record()
    for name, part in parts.items():
        part()
        ends[name].record()
    torch.cuda.synchronize()
    return {name: start.elapsed_time(end) for name, end in ends.items()}


def queued(parts: Mapping[str, Callable[[], object]], device: str, count: int) -> dict[str, float]:
    """Run the parts so many times without waiting for the device, and return the milliseconds of each time."""

    def repeat() -> None:
        for _ in range(count):
            for part in parts.values():
                part()

    return {"queued": elapsed({"": repeat}, device)[""] / count}


def interleaved(
    sides: dict[str, Work],
    rounds: Rounds,
    device: str,
    measure: Callable[[Mapping[str, Callable[[], object]], str], dict[str, float]] = elapsed,
) -> Iterator[Times]:
    """Time each side in each round, each round starting with another, and yield the times after each round.

    A side that fails is removed from ``sides``, with the memory that it holds. ``measure`` times the parts of one.
    """
    names = [*sides]
    times = Times({side: {part: [] for part in one.parts} for side, one in sides.items()})
    ends = time.monotonic() + rounds.seconds
    for turn in range(rounds.most + 1):  # the first one warms up
        if turn > rounds.least and time.monotonic() > ends:
            break
        for place in range(len(names)):
            side = names[(turn + place) % len(names)]
            if side not in sides:
                continue
            try:
                for _ in range(1 if turn else rounds.warm_up):
                    sides[side].prepare()
                    spent = measure(sides[side].parts, device)
                    sides[side].clear()
                if turn and rounds.queued:
                    sides[side].prepare()
                    spent |= queued(sides[side].parts, device, rounds.queued)
                    sides[side].clear()
            except Exception as error:  # of this side; it becomes a row
                times.failed[side] = failure(error)
                del sides[side]
            if side not in sides:
                release()
                continue
            for part, milliseconds in spent.items() if turn else ():
                times.spent[side].setdefault(part, []).append(milliseconds)
        if turn:
            yield times


def timed(times: Times, rounds: Rounds, baseline: str, called: str = "autocast") -> dict[str, Row]:
    """Return by side the medians in milliseconds, and quartiles of the ratios to ``baseline`` in the same round.

    A row of fewer rounds than the least is ``partial``. ``called`` is the baseline's name in the row.
    """
    rows: dict[str, Row] = {}
    for side, parts in times.spent.items():
        if side in times.failed:
            rows[side] = {"error": times.failed[side]}
            continue
        count = len(next(iter(parts.values())))
        if count < 2:  # no quartiles yet
            continue
        other = times.spent.get(baseline, {}) if baseline not in times.failed else {}
        rows[side] = {"rounds": count, **({"partial": True} if count < rounds.least else {})}
        for part, spent in parts.items():
            rows[side][f"{part}_ms"] = round(median(spent), 4)
            rows[side][f"{part}_quartiles"] = [round(quartile, 4) for quartile in quantiles(spent, n=4)]
            rows[side][f"{part}_to_{called}"] = ratios(spent, other.get(part))
    return rows


def kernels(work: Callable[[], object], most: int = 12, device: str = "cuda") -> Row:
    """Run ``work`` once, and return its number of kernels, those of attention by name, and those that take longest.

    On a CPU operators stand for kernels.
    """
    kind = device.upper()
    profile: Any = torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)])
    with profile as profiler:
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    on_device, time_of = getattr(torch.autograd.DeviceType, kind), attrgetter(f"self_{_OWN[device]}_time_total")
    events = [event for event in profiler.key_averages() if event.device_type == on_device and time_of(event) > 0]
    spent, counts = Counter[str](), Counter[str]()
    for event in events:  # variants of a template may begin alike
        spent[event.key[:120]] += time_of(event)
        counts[event.key[:120]] += event.count
    return {
        "kernels": sum(event.count for event in events),
        "kernels_ms": round(sum(map(time_of, events)) / 1e3, 3),
        "attention": {kernel: n for kernel, n in counts.items() if any(word in kernel.lower() for word in ATTENTION)},
        "longest": {kernel: round(us / 1e3, 3) for kernel, us in spent.most_common(most)},
    }
