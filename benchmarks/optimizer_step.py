"""What the optimizer's part of a training step costs the host, beside torch.amp.GradScaler and the bare optimizer.

    python -m benchmarks.optimizer_step [--sizes 10,200] [--optimizers SGD] [--rounds 200] [--json PATH]

Measured is one steady step, gradients at hand: scaling the loss, unscaling and checking the gradients, stepping,
updating the scale. Parameters have 16 elements, so that the host's work is all there is. Each optimizer and size has a
process of its own, in which the three sides take turns, round by round, each with parameters of its own, which are
made anew six times, in each order. Times are CPU time of the one thread, so that other processes count little:
medians, with quartiles, of the rounds. Counted besides, for each side: ATen calls; host reads; and frames of Python
that run in this package, comprehensions' too. The exit status is 1 where a step takes longer than GradScaler's, where
it reads more than once beyond what the bare optimizer reads, or at all if that is fused, or where the package's frames
grow with the number of parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autocastfx
from benchmarks.machine import machine

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
    """One side; times in microseconds. ``ratio`` is the median of what each round's time is to GradScaler's in it."""

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
    """The step of one side, which can be called again and again: its gradients are zero."""
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
    """Counts calls of operators, and of those that read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.reads = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.reads += func.name() == READ
        return func(*args, **(kwargs or {}))


def count_calls(step: Callable[[], None]) -> tuple[int, int]:
    """ATen calls of one step, and how many of them read on the host."""
    with _Calls() as calls:
        step()
    return calls.all, calls.reads


def count_frames(step: Callable[[], None]) -> int:
    """How many frames of this package one step runs: calls, and each time that a generator goes on."""
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
    """A row for each side."""
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
    """What does not hold."""
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
    """What is printed."""
    return "\n".join([_HEADER, *map(_line, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the optimizers and sizes asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer_step", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="separated by commas")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of parameters, separated by commas")
    parser.add_argument("--rounds", type=int, default=1000, help="for 500 parameters or fewer; default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    names, sizes = options.optimizers.split(","), [int(size) for size in options.sizes.split(",")]
    if unknown := [name for name in names if name not in OPTIMIZERS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(OPTIMIZERS)}")

    torch.set_num_threads(1)  # said in the results
    rows: list[Row] = []
    print(_HEADER)
    for name in names:
        for size in sizes:
            print(f"{name} {size} ...", file=sys.stderr, flush=True)
            rounds = max(4, options.rounds * 500 // max(size, 500))
            with multiprocessing.get_context("spawn").Pool(1) as fresh:  # what was measured before leaves its traces
                found = fresh.apply(measure, (name, size, rounds))
            rows += found
            for row in found:
                print(_line(row), flush=True)
    failed = failures(rows)
    for line in failed:
        print(line)
    if options.json:
        held = {**machine(), "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(held, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
