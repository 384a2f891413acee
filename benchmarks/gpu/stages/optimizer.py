"""Time the optimizer's part of a step, with gradients given, beside GradScaler and the bare optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median

import torch

import autocastfx
from benchmarks.gpu.measure import Work, interleaved, release, timed
from benchmarks.gpu.stage import Given, Rounds, Row

OURS, THEIRS, BARE = "LossScalingOptimizer", "GradScaler", "bare"
SHORT = Rounds(seconds=2)
# By what the model's name ends in; clipped ones first unscale the gradients and limit their norm.
SIDES = {"": (THEIRS, OURS, BARE), ", clipped": (THEIRS, OURS)}


def optimizer(given: Given, sizes: Sequence[tuple[int, int]], rounds: Rounds = SHORT) -> Iterator[Row]:
    """Yield a row for each side: fused AdamW of float32 parameters, with the device's and the host's time.

    Args:
        given: what every stage is given.
        sizes: numbers of parameters, and of the elements of each.
        rounds: how many, for each size.
    """
    for (tensors, elements), (kind, sides) in product(sizes, SIDES.items()):
        model = f"{tensors} x {elements}{kind}"
        if all(given.has(model, side) for side in sides):
            continue
        steps = {side: _step(side, given.device, tensors, elements, clips=bool(kind)) for side in sides}
        work = {side: Work({"step": step}) for side, step in steps.items()}
        for times in interleaved(work, rounds, given.device):
            for side, row in timed(times, rounds, THEIRS, "grad_scaler").items():
                yield {"model": model, "side": side, **row}
        for side, step in steps.items():
            hosts = [_host(step, given.device) for _ in range(rounds.least)]
            yield {"model": f"{model}, host", "side": side, "host_ms": round(median(hosts), 4)}
        steps.clear()
        work.clear()
        release()


def _host(step: Callable[[], object], device: str) -> float:
    """Return the milliseconds until the call returns, when the device has nothing else to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - started)


def _step(side: str, device: str, tensors: int, elements: int, *, clips: bool) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.ones(elements, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    bare, loss = torch.optim.AdamW(parameters, lr=1e-5, fused=True), torch.zeros((), device=device)
    if side == BARE:
        return bare.step
    if side == THEIRS:
        scaler = torch.amp.GradScaler(device)

        def theirs() -> None:
            scaler.scale(loss)
            if clips:
                scaler.unscale_(bare)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(bare)
            scaler.update()

        return theirs
    scaled = autocastfx.LossScalingOptimizer(bare)

    def ours() -> None:
        scaled.scale_loss(loss)
        if clips:
            scaled.clip_grad_norm_(1.0)
        scaled.step()

    return ours
