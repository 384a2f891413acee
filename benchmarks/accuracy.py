"""Whether training in 16 bits ends where float32 ends, with the same hyper-parameters, weights and batches.

    python -m benchmarks.accuracy [--tasks "digits ViT"] [--modes "float32,bfloat16 cast"] [--json PATH]

Each run trains one model in one mode from one seed and scores it in the same mode. Within a seed all modes begin with
the same weights and see the same batches; the optimizer and its learning rates are the task's. The mean over the seeds
may be 0.5 points of accuracy from float32's, or 0.01 nats of validation loss; the exit status is 1 where it is not.

With ``--json`` each run is written at once, and a run that the file holds is not repeated: stop and start again at
will. The float16 modes scale the loss by ``LossScalingOptimizer`` with its default rule.
"""

from __future__ import annotations

import argparse
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
from benchmarks.accuracy_tasks import TASKS, Batch, Task
from benchmarks.machine import machine

FLOAT32 = "float32"


@dataclass(frozen=True)
class Mode:
    """How a task's float32 model is trained.

    Attributes:
        prepare: makes of the model, and of a first batch of inputs, what is called in its place.
        is_scaled: whether the optimizer scales the loss.
        region: in which the model is called.
        tasks: for which it is measured; all if empty.
    """

    prepare: Callable[[nn.Module, Tensor], Any]
    is_scaled: bool = False
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    tasks: tuple[str, ...] = ()


class Half(nn.Module):
    """The model made 16-bit by hand, as NVIDIA's recipe says: all but its batch norms, inputs cast, outputs back."""

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
    """One training run; ``skipped`` counts steps that overflowed, ``seconds`` is for the record alone."""

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
    """Report each run that ``runs`` does not hold; a mode that convert does not know is told on stderr, and skipped."""
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
                except autocastfx.UnsupportedError as error:
                    print(f"not there yet: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                    break
                print(f"{run.score:.4f}, {run.seconds:.0f} s", file=sys.stderr, flush=True)
                report(run)


@dataclass(frozen=True)
class Row:
    """All seeds of a task in a mode; ``difference`` is of the means, ``deviation`` of the single differences."""

    task: str
    mode: str
    seeds: int
    mean: float
    difference: float
    deviation: float
    skipped: int
    passed: bool


def summary(runs: Sequence[Run]) -> list[Row]:
    """A row for each task and mode whose seeds are all there, and whose float32's are."""
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
    """What is printed."""
    return "\n".join([_HEADER, *map(_line, rows)])


def failures(rows: Sequence[Row]) -> list[Row]:
    """Rows that are too far from float32; of the mode that does not scale, those that are not."""
    return [row for row in rows if row.passed == (row.mode == UNSCALED)]


def read(path: Path | None) -> list[Run]:
    """The runs that a file holds; none if there is no file."""
    if path is None or not path.exists():
        return []
    return [Run(**run) for run in json.loads(path.read_text())["runs"]]


def write(path: Path, runs: Sequence[Run]) -> None:
    """The runs and what they come to, and where the last was made."""
    held = {**machine(), "rows": [asdict(row) for row in summary(runs)], "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(held, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is asked for and not there yet, and print the table of all that is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default=",".join(TASKS), help="separated by commas")
    parser.add_argument("--modes", default=",".join(MODES), help="separated by commas")
    parser.add_argument("--json", type=Path, help="the store of runs")
    options = parser.parse_args(arguments)
    tasks, modes = options.tasks.split(","), options.modes.split(",")
    for asked, known in ((tasks, TASKS), (modes, MODES)):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")

    torch.set_num_threads(1)
    runs = [run for run in read(options.json) if run.task in TASKS and run.protocol == TASKS[run.task].protocol]

    def report(run: Run) -> None:
        runs.append(run)
        if options.json:
            write(options.json, runs)

    train_all(tasks, modes, runs, report)
    rows = summary(runs)
    print(table(rows))
    return int(bool(failures(rows)))


if __name__ == "__main__":
    sys.exit(main())
