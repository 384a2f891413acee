"""Compare accuracy after training in 16 bits and in float32, with the same hyper-parameters, weights and batches.

    python -m benchmarks.accuracy [--tasks "digits ViT"] [--modes "float32,bfloat16 cast"] [--json PATH]

Each run trains and scores one model in one mode from one seed. Within a seed all modes start with the same weights and
see the same batches; the task fixes the optimizer and learning rates. The exit status is 1 if the mean over the seeds
differs from float32's by more than 0.5 points of accuracy, or 0.01 nats of validation loss.

With ``--json`` each run is written at once, and runs in the file are not repeated, so that an interrupted benchmark can
continue. The float16 modes scale the loss with ``LossScalingOptimizer`` and its default rule.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import UnsupportedError
from benchmarks.command import Command
from benchmarks.machine import machine
from benchmarks.models.tasks import TASKS, Batch, Task

FLOAT32 = "float32"


@dataclass(frozen=True)
class Mode:
    """A way to train a task's float32 model.

    Attributes:
        prepare: turns the model and a first batch of inputs into the callable to train.
        is_scaled: True if the optimizer scales the loss.
        region: the context in which the model is called.
        tasks: the tasks it is measured for; all if empty.
    """

    prepare: Callable[[nn.Module, Tensor], Any]
    is_scaled: bool = False
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    tasks: tuple[str, ...] = ()


class Half(nn.Module):
    """The model made 16-bit by hand with NVIDIA's recipe: all but batch norms; inputs are cast, outputs cast back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs.half() if inputs.is_floating_point() else inputs).float()


def _converted(dtype: torch.dtype, weights: str) -> Callable[[nn.Module, Tensor], Any]:
    def prepare(model: nn.Module, inputs: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "float16 convolutions on a CPU")  # that is known here
            return autocastfx.convert(model, (inputs,), dtype=dtype, weights=weights)

    return prepare


MODES: dict[str, Mode] = {
    FLOAT32: Mode(lambda model, _: model),
    "torch.autocast bfloat16": Mode(lambda model, _: model, region=lambda: torch.autocast("cpu", torch.bfloat16)),
    "bfloat16 cast": Mode(_converted(torch.bfloat16, "cast")),
    "bfloat16 cached": Mode(_converted(torch.bfloat16, "cached")),
    "float16 cast": Mode(_converted(torch.float16, "cast"), is_scaled=True),
    "float16 cached": Mode(_converted(torch.float16, "cached"), is_scaled=True),
    "float16 model.half()": Mode(lambda model, _: Half(model), is_scaled=True),
    "float16 not scaled": Mode(_converted(torch.float16, "cast"), tasks=("underflow",)),
}
UNSCALED = "float16 not scaled"  # is there to fail


@dataclass(frozen=True)
class Run:
    """A training run; ``skipped`` counts steps that overflowed; ``seconds`` is informative only."""

    task: str
    mode: str
    seed: int
    protocol: str
    score: float
    skipped: int
    seconds: float


def train(name: str, task: Task, mode_name: str, seed: int) -> Run:
    """Train and score.

    Raises:
        UnsupportedError: ``convert`` does not take the mode's arguments.
    """
    started, mode = time.perf_counter(), MODES[mode_name]
    torch.manual_seed(seed)
    batches: Iterator[Batch] = task.batches(seed)
    first, _ = next(task.batches(seed))
    model = mode.prepare(task.build(), first)
    optimizer: Any = task.optimizer(model.parameters())
    if mode.is_scaled:
        optimizer = autocastfx.LossScalingOptimizer(optimizer)
    model.train()
    skipped = 0
    for step, (inputs, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        with mode.region():
            loss = task.loss(model(inputs).float(), labels)
        optimizer.zero_grad()
        if mode.is_scaled:
            optimizer.backward(loss)
            optimizer.step()
            skipped += optimizer.last_step.skipped
        else:
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.inference_mode(), mode.region():
        score = task.score(model)
    return Run(name, mode_name, seed, task.protocol, score, skipped, round(time.perf_counter() - started, 2))


def train_all(names: Sequence[str], modes: Sequence[str], runs: list[Run], report: Callable[[Run], None]) -> None:
    """Report each run that is not in ``runs``. Modes that ``convert`` refuses are named on stderr and skipped."""
    held = {(run.task, run.mode, run.seed, run.protocol) for run in runs}
    for name in names:
        task = TASKS[name]
        for mode in modes:
            if MODES[mode].tasks and name not in MODES[mode].tasks:
                continue
            for seed in range(task.seeds):
                if (name, mode, seed, task.protocol) in held:
                    continue
                print(f"{name}, {mode}, seed {seed} ...", end=" ", file=sys.stderr, flush=True)
                try:
                    run = train(name, task, mode, seed)
                except UnsupportedError as error:
                    print(f"not there yet: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                    break
                print(f"{run.score:.4f}, {run.seconds:.0f} s", file=sys.stderr, flush=True)
                report(run)


@dataclass(frozen=True)
class Row:
    """The results of a task in a mode over all seeds, with mean and standard deviation of the difference to float32."""

    task: str
    mode: str
    seeds: int
    mean: float
    difference: float
    deviation: float
    skipped: int
    passed: bool


def summary(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each task and mode that has all seeds, also in float32."""
    rows = []
    for name, task in TASKS.items():
        mine = [run for run in runs if run.task == name and run.protocol == task.protocol]
        scores = {mode: {run.seed: run.score for run in mine if run.mode == mode} for mode in MODES}
        for mode, by_seed in scores.items():
            if len(by_seed) < task.seeds or len(scores[FLOAT32]) < task.seeds:
                continue
            differences = [by_seed[seed] - scores[FLOAT32][seed] for seed in range(task.seeds)]
            difference = mean(differences)
            skipped = sum(run.skipped for run in mine if run.mode == mode)
            passed = abs(difference) <= task.tolerance
            deviation = stdev(differences) if len(differences) > 1 else 0.0
            rows.append(Row(name, mode, task.seeds, mean(by_seed.values()), difference, deviation, skipped, passed))
    return rows


_HEADER = f"{'task':<14} {'mode':<24} {'seeds':>5} {'mean':>8} {'difference':>10} {'+-':>7} {'skipped':>7}  within"


def _line(row: Row) -> str:
    task = TASKS[row.task]
    verdict = "learns nothing, as it must" if row.mode == UNSCALED else "passed" if row.passed else "FAILED"
    return (
        f"{row.task:<14} {row.mode:<24} {row.seeds:>5} {row.mean:>8.4g} {row.difference:>+10.4f} {row.deviation:>7.4f} "
        f"{row.skipped:>7}  {task.tolerance:g} {task.measure}: {verdict}"
    )


def table(rows: Sequence[Row]) -> str:
    """Write the table to print."""
    return "\n".join([_HEADER, *map(_line, rows)])


def failures(rows: Sequence[Row]) -> list[Row]:
    """Return rows that are too far from float32, and rows without loss scaling that are not."""
    return [row for row in rows if row.passed == (row.mode == UNSCALED)]


def read(path: Path | None) -> list[Run]:
    """Read the runs of a file; none if it does not exist."""
    if path is None or not path.exists():
        return []
    return [Run(**run) for run in json.loads(path.read_text())["runs"]]


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write the runs, their summary, and the machine of the last run."""
    held = {**machine(), "rows": [asdict(row) for row in summary(runs)], "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(held, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the missing runs among those asked for, and print the table of all runs."""
    command = Command("accuracy", __doc__)
    command.names("--tasks", TASKS)
    command.names("--modes", MODES)
    options = command.begin(arguments)
    runs = [run for run in read(options.json) if run.task in TASKS and run.protocol == TASKS[run.task].protocol]

    def report(run: Run) -> None:
        runs.append(run)
        if options.json:
            write(options.json, runs)

    train_all(options.tasks, options.modes, runs, report)
    rows = summary(runs)
    print(table(rows))
    return int(bool(failures(rows)))


if __name__ == "__main__":
    sys.exit(main())
