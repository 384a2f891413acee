"""Measure the host's time in the optimizer's part of a step, against torch.amp.GradScaler and the bare optimizer.

    python -m benchmarks.optimizer_step [--sizes 10,200] [--optimizers SGD] [--rounds 200] [--json PATH]

A step, with gradients given, scales the loss, unscales and checks the gradients, steps, and updates the scale.
Parameters have 16 elements, so that only the host's work counts. Each optimizer and size runs in its own process, where
the three sides take turns in rounds; each has its own parameters, created six times, once in each order. Times are CPU
time of the one thread, so that other processes matter little: medians, with quartiles, over the rounds. ATen calls,
host reads, and Python frames in this package (comprehensions included) are counted for each side. The exit status is 1
if a step takes longer than GradScaler's, reads more than once beyond the bare optimizer's reads (or at all with a fused
one), or runs a number of the package's frames that grows with the number of parameters.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autocastfx
from benchmarks.command import Command, settings_of, verdict
from benchmarks.store import Store

SIZES = (10, 200, 2000)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "Adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3, fused=True),
}
OURS, THEIRS, BARE = "LossScalingOptimizer", "GradScaler", "bare"
SIDES = (OURS, THEIRS, BARE)
LIMIT = 1.0  # times GradScaler's median
READ = "aten::_local_scalar_dense"
PACKAGE = str(Path(autocastfx.__file__).parent)


@dataclass(frozen=True)
class Row:
    """A side; times in microseconds. ``ratio`` is the median over rounds of its time divided by GradScaler's."""

    optimizer: str
    parameters: int
    side: str
    lower_quartile: float
    median: float
    upper_quartile: float
    ratio: float
    aten_calls: int
    host_reads: int
    package_frames: int


def side(name: str, optimizer_name: str, size: int) -> Callable[[], None]:
    """Return a side's step, which can be repeated: its gradients are zero."""
    parameters = [torch.nn.Parameter(torch.ones(16)) for _ in range(size)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer, loss = OPTIMIZERS[optimizer_name](parameters), torch.zeros(())
    if name == OURS:
        return _ours(autocastfx.LossScalingOptimizer(optimizer), loss)
    if name == THEIRS:
        return _theirs(torch.amp.GradScaler("cpu"), optimizer, loss)
    return lambda: optimizer.step() and None


def _ours(optimizer: autocastfx.LossScalingOptimizer, loss: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.scale_loss(loss)
        optimizer.step()

    return step


def _theirs(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    return step


class _Calls(TorchDispatchMode):
    """Counts calls of operators, and of operators that read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.reads = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.reads += func.name() == READ
        return func(*args, **(kwargs or {}))


def count_calls(step: Callable[[], None]) -> tuple[int, int]:
    """Count the ATen calls of a step, and those that read on the host."""
    with _Calls() as calls:
        step()
    return calls.all, calls.reads


def count_frames(step: Callable[[], None]) -> int:
    """Count the frames of this package that a step runs: calls, and each resumption of a generator."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


def measure(optimizer: str, size: int, rounds: int) -> list[Row]:
    """Return a row for each side."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    counts: dict[str, tuple[int, int, int]] = {}
    for order in itertools.permutations(SIDES):  # where in memory a side lies has a part in its times
        steps = {name: side(name, optimizer, size) for name in order}
        for name, step in steps.items():
            for _ in range(3):  # state is made in the first
                step()
            counts[name] = (*count_calls(step), count_frames(step))
        for turn in range(-(-rounds // 6)):
            for place in range(len(SIDES)):
                name = order[(turn + place) % len(SIDES)]  # each is first as often
                step = steps[name]
                started = time.thread_time()
                step()
                times[name].append(1e6 * (time.thread_time() - started))
    quartiles = {name: quantiles(times[name], n=4) for name in SIDES}
    return [
        Row(
            optimizer,
            size,
            name,
            *(round(quartile, 2) for quartile in quartiles[name]),
            round(median(a / b for a, b in zip(times[name], times[THEIRS], strict=True)), 4),
            *counts[name],
        )
        for name in SIDES
    ]


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each requirement that is not met."""
    found, ours = [], [row for row in rows if row.side == OURS]
    bare = {(row.optimizer, row.parameters): row.host_reads for row in rows if row.side == BARE}
    for row in ours:
        what = f"{row.optimizer}, {row.parameters} parameters:"
        if row.ratio > LIMIT:
            found.append(f"{what} {row.ratio:.3f} times GradScaler's time, the limit is {LIMIT}")
        reads = row.host_reads - bare[row.optimizer, row.parameters]
        if reads > (0 if "fused" in row.optimizer else 1):
            found.append(f"{what} {reads} host reads more than the bare optimizer")
    for name in OPTIMIZERS:
        frames = {row.package_frames for row in ours if row.optimizer == name}
        if len(frames) > 1:
            found.append(f"{name}: {', '.join(map(str, sorted(frames)))} frames, by the number of parameters")
    return found


_HEADER = (
    f"{'optimizer':<14} {'parameters':>10} {'side':<20} {'median us':>10} {'quartiles':>19} {'to GradScaler':>13} "
    f"{'ATen':>6} {'reads':>5} {'frames':>6}"
)


def _line(row: Row) -> str:
    spread = f"{row.lower_quartile:.1f} {row.upper_quartile:.1f}"
    return (
        f"{row.optimizer:<14} {row.parameters:>10} {row.side:<20} {row.median:>10.1f} {spread:>19} "
        f"{row.ratio:>13.2f} {row.aten_calls:>6} {row.host_reads:>5} {row.package_frames:>6}"
    )


def table(rows: Sequence[Row]) -> str:
    """Write the table to print."""
    return "\n".join([_HEADER, *map(_line, rows)])


def _in_a_process(optimizer: str, size: int, rounds: int) -> list[Row]:
    """Measure in a new process, because what was measured before leaves its traces."""
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        return fresh.apply(measure, (optimizer, size, max(4, rounds * 500 // max(size, 500))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the optimizers and sizes asked for."""
    command = Command("optimizer_step", __doc__)
    command.names("--optimizers", OPTIMIZERS)
    command.numbers("--sizes", SIZES)
    command.number("--rounds", 1000)  # for 500 parameters or fewer
    options = command.begin(arguments)
    store = Store(options.json, Row, settings_of(options, "rounds"))
    asked = itertools.product(options.optimizers, options.sizes)
    store.fill(asked, "optimizer parameters", lambda pair: _in_a_process(*pair, options.rounds))
    return verdict(table(store.rows), failures(store.rows))


if __name__ == "__main__":
    sys.exit(main())
