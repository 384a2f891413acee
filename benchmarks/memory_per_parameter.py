"""Count the bytes per parameter in training, by mode: the memory between two steps, and a step's peak.

    python -m benchmarks.memory_per_parameter [--modes "float32;float16 cached"] [--width 1024] [--json PATH]

A perceptron of ten square layers, with few activations compared to weights, is trained with fused AdamW. After the
last of three steps, before gradients are dropped, the storages of all live tensors are counted, each once. Peaks are
the most bytes that the optimizer's part of a step, and the whole step, allocate at one time, by the allocator's events.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import autocastfx
from autocastfx.errors import UnsupportedError
from benchmarks.machine import machine

WIDTH, DEPTH, BATCH = 1024, 10, 4
STEPS = 3


@dataclass(frozen=True)
class Row:
    """Bytes per parameter; ``working`` counts live tensors that are none of the others: 16-bit working copies.

    ``optimizer_peak`` and ``step_peak`` are None if nothing is trained. A note says why numbers are missing.
    """

    mode: str
    parameters: int = 0
    weights: float = 0.0
    gradients: float = 0.0
    masters: float = 0.0
    state: float = 0.0
    working: float = 0.0
    total: float = 0.0
    optimizer_peak: float | None = None
    step_peak: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Training:
    """A model, its optimizer (None for inference), and the two halves of a step."""

    model: nn.Module
    optimizer: Any
    loss: Callable[[], Tensor]
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]


def _model(width: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def _float32(width: int) -> Training:
    model, x = _model(width), torch.ones(BATCH, width)
    optimizer = _adamw(model)
    return Training(model, optimizer, lambda: model(x).square().mean(), lambda loss: loss.backward(), optimizer.step)


def _autocast(width: int) -> Training:
    model, x, scaler = _model(width), torch.ones(BATCH, width), torch.amp.GradScaler("cpu")
    optimizer = _adamw(model)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x).float().square().mean()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Training(model, optimizer, loss, lambda loss: scaler.scale(loss).backward(), step)


def _scaled(model: nn.Module, x: Tensor) -> Training:
    optimizer = autocastfx.LossScalingOptimizer(_adamw(model))
    return Training(model, optimizer, lambda: model(x).float().square().mean(), optimizer.backward, optimizer.step)


def _converted(weights: str) -> Callable[[int], Training]:
    def make(width: int) -> Training:
        x = torch.ones(BATCH, width)
        return _scaled(autocastfx.convert(_model(width), (x,), dtype=torch.float16, weights=weights), x)

    return make


def _half(width: int) -> Training:
    return _scaled(_model(width).half(), torch.ones(BATCH, width, dtype=torch.float16))


def _low(width: int) -> Training:
    x = torch.ones(BATCH, width)
    model = autocastfx.convert(_model(width).eval(), (x,), dtype=torch.float16, weights="low").eval()
    return Training(model, None, lambda: model(x), lambda _: None, lambda: None)


_WORK = "what is measured"
MODES: dict[str, Callable[[int], Training]] = {
    "float32": _float32,
    "torch.autocast float16, GradScaler": _autocast,
    "float16 cast": _converted("cast"),
    "float16 cached": _converted("cached"),
    "float16 model.half(), masters": _half,
    "float16 low, inference": _low,
}


def live() -> dict[int, int]:
    """Return the bytes of the storage of each live tensor on the CPU, by address."""
    gc.collect()
    held: list[Tensor] = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `.grad` of what is no leaf
        held += [grad for tensor in held if (grad := tensor.grad) is not None]
    return _storages(held)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    found = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.device.type == "cpu"}


def peak(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> int:
    """Return the most bytes that ``work`` holds at one time beyond those at its start.

    ``before`` runs first, because the profiler knows the size of a freed block only if it saw its allocation.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        before()
        with record_function(_WORK):
            work()
    events: Any = found.profiler
    everything = sorted(events.kineto_results.events(), key=lambda event: event.start_ns())
    most = now = 0
    for event in everything[next(i for i, event in enumerate(everything) if event.name() == _WORK) :]:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measure(mode: str, width: int) -> Row:
    """Train for some steps and count bytes; returns a note if ``convert`` refuses the mode."""
    before = live()
    try:
        training = MODES[mode](width)
    except UnsupportedError as error:
        return Row(mode, note=f"not there yet: {str(error).splitlines()[0]}")
    optimizer = training.optimizer

    def forward_and_backward() -> None:
        training.backward(training.loss())

    def step() -> None:
        forward_and_backward()
        training.step()

    with contextlib.nullcontext() if optimizer is not None else torch.inference_mode():

        def step_and_forget() -> None:
            step()
            if optimizer is not None:
                optimizer.zero_grad()

        for _ in range(STEPS - 2):
            step_and_forget()
        step_peak = peak(step, step_and_forget)
        if optimizer is not None:
            optimizer.zero_grad()
        optimizer_peak = peak(training.step, forward_and_backward)
    total = {address: size for address, size in live().items() if before.get(address) != size}
    weights = list(training.model.parameters())
    masters = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    states = [] if optimizer is None else [held for state in optimizer.state.values() for held in state.values()]
    kinds = {
        "weights": weights,
        "gradients": [p.grad for p in (*weights, *masters) if p.grad is not None],
        "masters": [p for p in masters if not any(p is weight for weight in weights)],
        "state": [held for held in states if isinstance(held, Tensor)],
    }
    count = sum(weight.numel() for weight in weights)
    bytes_of = {kind: sum(_storages(tensors).values()) for kind, tensors in kinds.items()}
    return Row(
        mode,
        count,
        **{kind: size / count for kind, size in bytes_of.items()},
        working=(sum(total.values()) - sum(bytes_of.values())) / count,
        total=sum(total.values()) / count,
        optimizer_peak=optimizer_peak / count if optimizer is not None else None,
        step_peak=step_peak / count if optimizer is not None else None,
    )


_KINDS = ("weights", "gradients", "masters", "state", "working", "total")
_HEADER = f"{'mode':<36}" + "".join(f"{kind:>11}" for kind in (*_KINDS, "optimizer+", "step+"))


def _line(row: Row) -> str:
    if row.note:
        return f"{row.mode:<36} {row.note}"
    peaks = "".join(f"{'-' if found is None else f'{found:.2f}':>11}" for found in (row.optimizer_peak, row.step_peak))
    return f"{row.mode:<36}" + "".join(f"{getattr(row, kind):>11.2f}" for kind in _KINDS) + peaks


def table(rows: Sequence[Row]) -> str:
    """Write the table to print."""
    return "\n".join([_HEADER, *map(_line, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the modes asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_per_parameter", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--modes", default=";".join(MODES), help="separated by semicolons")
    parser.add_argument("--width", type=int, default=WIDTH, help="of a layer; default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    modes = options.modes.split(";")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"unknown: {'; '.join(unknown)}; there are {'; '.join(MODES)}")

    rows: list[Row] = []
    print(f"bytes for each of {DEPTH * options.width * (options.width + 1):,} parameters\n{_HEADER}")
    for mode in modes:
        rows.append(measure(mode, options.width))
        print(_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
