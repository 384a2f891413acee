"""Time training steps of a model's sides, eager, compiled, or replayed from CUDA graphs; and measure their memory."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.measure import Work, interleaved, kernels, peak, said, timed
from benchmarks.gpu.models import built
from benchmarks.gpu.sides import DTYPES, Source, source
from benchmarks.gpu.stage import ROUNDS, Given, Rounds, Row
from benchmarks.training import AUTOCAST, HALF, SIDES, Setting, Training, training_of

__all__ = ["in_a_graph", "memory", "steps"]


def steps(
    given: Given, model: str, dtype: str, sides: Sequence[str], kind: str = "eager", rounds: Rounds = ROUNDS
) -> Iterator[Row]:
    """Yield a row for each side: times, peak memory, and on a GPU the kernels of a step.

    Args:
        given: what every stage is given.
        model: a key of ``MODELS``.
        dtype: a key of ``DTYPES``.
        sides: the others are compared with torch.autocast.
        kind: "eager", "compiled", or "graph", which replays steps from a CUDA graph.
        rounds: how many.
    """
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True
    if all(given.has(model, side, dtype) for side in sides):
        return
    setting = Setting(given.device, DTYPES[dtype], kind == "compiled", kind == "graph")
    started = time.monotonic()
    found = source(model, given.device)
    captured = round(time.monotonic() - started, 1)
    made: dict[str, Training] = {}
    for side in sides:
        try:
            made[side] = found.side(side, setting)
        except Exception as error:  # of this side; the others are measured
            yield {"model": model, "side": side, "dtype": dtype, "error": said(error)}
    given.wait()

    work: dict[str, Work] = {}
    for side, one in made.items():
        try:
            work[side] = Work({"step": in_a_graph(one)}) if kind == "graph" else _parts(one)
        except Exception as error:
            yield {"model": model, "side": side, "dtype": dtype, "error": said(error)}
    started = time.monotonic()
    times = interleaved(work, rounds, given.device)
    measured = {"kind": kind, "captured_s": captured, "measured_s": round(time.monotonic() - started, 1)}
    rows = timed(times, AUTOCAST)
    for side, row in rows.items():
        more: Row = {}
        if given.device == "cuda" and "error" not in row:
            step = work[side].parts["step"]
            more = {} if kind == "graph" else {"peak": peak(step), "held": torch.cuda.memory_allocated()}
        yield {"model": model, "side": side, "dtype": dtype, **measured, **row, **more}
    for side in rows if given.device == "cuda" else ():
        if side not in times.failed:
            work[side].prepare()
            found_kernels = kernels(work[side].parts["step"])
            yield {"model": f"{model}, kernels", "side": side, "dtype": dtype, **found_kernels}


def _parts(one: Training) -> Work:
    def step() -> None:
        one.forward_and_backward()
        one.step()
        one.prepare()

    return Work({"backward": one.forward_and_backward, "step": step}, one.prepare, partial(_drop, one))


def _drop(one: Training) -> None:
    """Drop the gradients, those of masters too."""
    one.optimizer.zero_grad()


def in_a_graph(one: Training, warm_up: int = 3) -> Callable[[], None]:
    """Run steps to warm up, on a stream of their own, record one in a CUDA graph, and return what replays it."""
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            one.forward_and_backward()
            one.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.forward_and_backward()
        one.step()
    return graph.replay


def memory(given: Given, model: str, dtype: str, sides: Sequence[str]) -> Iterator[Row]:
    """Yield the most bytes allocated in training steps of each side, alone on the device, optimizer state included."""
    warnings.simplefilter("ignore")
    setting = Setting(given.device, DTYPES[dtype])
    found: Source | None = source(model, given.device)
    given.wait()
    for side in sorted(sides, key=lambda name: SIDES[name].is_half):  # which comes last, without the float32 model
        if given.has(model, side, dtype):
            continue
        try:
            if SIDES[side].is_half:
                found = None
                gc.collect()
            row = _allocated(found, side, setting, model)
        except Exception as error:  # of this side; the others are measured
            row = {"error": said(error)}
        gc.collect()
        torch.cuda.empty_cache()
        yield {"model": model, "side": side, "dtype": dtype, **row}


def _allocated(found: Source | None, side: str, setting: Setting, model: str) -> Row:
    one = _half(model, setting) if found is None else found.side(side, setting)
    for _ in range(2):
        one.prepare()
        one.forward_and_backward()
        one.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one.prepare()
    one.forward_and_backward()
    one.step()
    return {"before": before, "peak": torch.cuda.max_memory_allocated()}


def _half(model: str, setting: Setting) -> Training:
    module, inputs = built(model, setting.device)
    given = {key: t.to(setting.dtype) if t.is_floating_point() else t for key, t in inputs.items()}
    return training_of(HALF, module.to(setting.dtype), given, setting, has_masters=True)
