"""Time the optimizer's part of a step, with gradients given, beside GradScaler and the bare optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

import autocastfx
from benchmarks.gpu.measure import Work, interleaved, timed
from benchmarks.gpu.stage import ROUNDS, Given, Rounds, Row

__all__ = ["optimizer"]

OURS, THEIRS, BARE = "LossScalingOptimizer", "GradScaler", "bare"
CLIPPED = "LossScalingOptimizer, clipped"
SIDES = (THEIRS, OURS, CLIPPED, BARE)


def optimizer(given: Given, tensors: int, elements: int, rounds: Rounds = ROUNDS) -> Iterator[Row]:
    """Yield a row for each side: fused AdamW of float32 parameters, with the device's and the host's time.

    Args:
        given: what every stage is given.
        tensors: number of parameters.
        elements: of each.
        rounds: how many.
    """
    model = f"{tensors} x {elements}"
    if all(given.has(model, side) for side in SIDES):
        return
    steps = {side: _step(side, given.device, tensors, elements) for side in SIDES}
    rows = timed(
        interleaved({side: Work({"step": step}) for side, step in steps.items()}, rounds, given.device), THEIRS
    )
    for side, row in rows.items():
        hosts = [_host(steps[side], given.device) for _ in range(rounds.least)]
        named = {key.replace("autocast", "grad_scaler"): value for key, value in row.items()}
        yield {"model": model, "side": side, **named, "host_ms": round(median(hosts), 4)}


def _host(step: Callable[[], object], device: str) -> float:
    """Return the milliseconds until the call returns, when the device has nothing else to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - started)


def _step(side: str, device: str, tensors: int, elements: int) -> Callable[[], object]:
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
            scaler.step(bare)
            scaler.update()

        return theirs
    scaled = autocastfx.LossScalingOptimizer(bare)

    def ours() -> None:
        scaled.scale_loss(loss)
        if side == CLIPPED:
            scaled.clip_grad_norm_(1.0)
        scaled.step()

    return ours
