"""Time training steps of a model's sides, eager, compiled, or replayed from CUDA graphs; and measure their memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.measure import Work, failure, interleaved, kernels, release, settle, timed
from benchmarks.gpu.sides import DTYPES, Source, source
from benchmarks.gpu.stage import ROUNDS, Given, Rounds, Row
from benchmarks.models.gpu import built
from benchmarks.training import AUTOCAST, HALF, Setting, Training, halved, side_of, training_of

KERNELS = ", kernels"  # after the model's name, in the rows of what the profiler saw
PROFILED = Rounds(3, 3, warm_up=0)


def steps(
    given: Given,
    model: str,
    sides: Sequence[str],
    dtypes: Sequence[str] = tuple(DTYPES),
    kind: str = "eager",
    rounds: Rounds = ROUNDS,
) -> Iterator[Row]:
    """Yield a row for each dtype and side, after each round anew; then one for the kernels of its steps.

    The model is captured once. ``backward_ms`` is the time of forward and backward, ``step_ms`` that of the whole step:
    with the optimizer's part, and with the working copies that the next step reads. ``queued_ms`` is the time of one of
    several steps that run without waiting for the device, ``kernels_ms`` what the profiler adds up of a step's kernels.

    Args:
        given: what every stage is given.
        model: a key of ``MODELS``.
        sides: the others are compared with torch.autocast.
        dtypes: keys of ``DTYPES``.
        kind: "eager", "compiled", or "graph", which replays steps from a CUDA graph.
        rounds: how many, for each dtype.
    """
    warnings.simplefilter("ignore")
    torch._C._set_cudnn_benchmark(True)  # torch.backends.cudnn refuses where something has closed its global flags
    names = (model, *([] if kind == "graph" else [f"{model}{KERNELS}"]))
    left = [dtype for dtype in dtypes if not all(given.has(*row, dtype) for row in product(names, sides))]
    if not left:
        return
    started = time.monotonic()
    found = source(model, given.device)
    found.prepare(sides, [DTYPES[dtype] for dtype in left])
    settle()
    captured = {"kind": kind, "prepared_s": round(time.monotonic() - started, 1)}
    try:
        captured |= _size(model, found)
    except Exception as error:  # times are worth having without it
        yield {"model": model, "error": failure(error)}
    for dtype in left:
        setting = Setting(given.device, DTYPES[dtype], kind == "compiled", kind == "graph")
        named = {"model": model, "dtype": dtype}
        work = dict[str, Work]()
        for side in sides:
            try:
                work[side] = _work(found.side(side, setting, shares_state=True), kind, given)
            except Exception as error:  # of this side; the others are measured
                yield {**named, "side": side, "error": failure(error)}
            release()
        given.wait()
        for times in interleaved(work, rounds, given.device):
            for side, row in timed(times, rounds, AUTOCAST).items():
                yield {**named, "side": side, **captured, **row}
        if kind != "graph":
            yield from _kernels(named, work, given.device)
        work.clear()
        release()


def _work(one: Training, kind: str, given: Given) -> Work:
    """Return the parts of a step. A compiled one has run; one for a CUDA graph is recorded at the stage's turn."""
    if kind == "graph":
        given.wait()
        return Work({"step": in_a_graph(one)})

    def update() -> None:
        one.step()
        one.prepare()

    if kind == "compiled":
        one.forward_and_backward()
        update()
    # The other sides' steps have changed the weights, and made this side's copies of them stale.
    return Work({"backward": one.forward_and_backward, "step": update}, one.prepare)


def _size(model: str, found: Source) -> Row:
    """Return the tokens or images of a step, and the floating-point operations of its products."""
    from benchmarks.gpu.ledger import count

    first = next(iter(found.inputs.values()))
    kinds = count(model, HALF).kernels.items()
    # Of attention's 14 parts the backward kernel computes 2 again, which do not count.
    flops = sum(entry.flops * (12 / 14 if kind == "attention" else 1) for kind, entry in kinds)
    return {"items": len(first) if first.is_floating_point() else first.numel(), "flops": flops}


def _kernels(named: Row, work: dict[str, Work], device: str) -> Iterator[Row]:
    """Yield the kernels of each side's steps, which the profiler sees in turns."""
    seen = dict[str, Row]()

    def profile(side: str, one: Work) -> float:
        seen[side] = kernels(lambda: [part() for part in one.parts.values()], device=device)
        return seen[side]["kernels_ms"]

    profiles = {side: Work({"kernels": partial(profile, side, one)}, one.prepare) for side, one in work.items()}
    if profiles:
        *_, times = interleaved(profiles, PROFILED, device, lambda parts, _: {key: run() for key, run in parts.items()})
        for side, row in timed(times, PROFILED, AUTOCAST).items():
            yield {**named, "model": f"{named['model']}{KERNELS}", "side": side, **seen.get(side, {}), **row}


def in_a_graph(one: Training, warm_up: int = 3) -> Callable[[], None]:
    """Run steps to warm up, on a stream of their own, record one in a CUDA graph, and return what replays it."""
    # Garbage of other sides may keep the parameters' autograd nodes alive, which belong to the default stream. The
    # recorded backward would use them, and that stream cannot take part in a recording.
    release()
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
    return partial(_replay, graph, one)


def _replay(graph: Any, one: Training) -> None:
    """Replay a step of ``one``, which must not be freed before the graph: that reads its tensors."""
    del one
    graph.replay()


def memory(given: Given, model: str, dtype: str, sides: Sequence[str]) -> Iterator[Row]:
    """Yield the most bytes allocated in training steps of each side, alone on the device, optimizer state included."""
    warnings.simplefilter("ignore")
    setting = Setting(given.device, DTYPES[dtype])
    found: Source | None = source(model, given.device)
    settle()
    given.wait()
    for side in sorted(sides, key=lambda name: side_of(name).is_half):  # which comes last, without the float32 model
        if given.has(model, side, dtype):
            continue
        try:
            if side_of(side).is_half:
                found = None
                release()
            row = _allocated(found, side, setting, model)
        except Exception as error:  # of this side; the others are measured
            row = {"error": failure(error)}
        release()
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
    return training_of(HALF, *halved(HALF, *built(model, setting.device), setting.dtype), setting, masters="float32")
