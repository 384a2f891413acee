"""Compare how closely 16-bit losses follow float32's over 200 training steps, with torch.autocast as the reference.

    python -m benchmarks.losses [--models "GPT-2 2x64"] [--seeds 3] [--json PATH]
    python -m benchmarks.losses --device cuda --dtype float16 --json PATH

Within a seed all sides start with the same float32 weights and see the same batches, with the same AdamW and learning
rates, which rise for 20 steps and fall to 0 along a cosine. The recorded loss is the cross entropy of a step's logits
in nats, computed in float32 for all sides; training uses the loss that the model returns, in the side's precision.

The *distance* of a run is the root mean square, over all steps, of its loss minus that of the float32 run of the same
seed. *At the end* is the mean of its last 20 losses minus float32's. ``float32, rounded start`` is the control: it
trains in float32 from weights that were rounded to 16 bits once, which shows how much training itself amplifies a
difference: sometimes, by chance, much.

The criterion is the geometric mean, over models and seeds, of a side's distance divided by torch.autocast's of the same
seed. It may exceed 1 by two standard errors of torch.autocast alone: with n ratios the limit is exp(2 s sqrt(2 / n)),
where s is the standard deviation, over the seeds of a model, of the logarithm of torch.autocast's distance (the root
mean square over the models). The exit status is 1 if one of this package's sides is above that.

``pure half`` updates 16-bit weights, or with masters float32 ones; it is not judged. float16 losses are scaled, steps
that overflow are skipped, and 16-bit weights always have masters.

With ``--json`` each run is written at once; runs of the same commit are not repeated.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, variance

import torch
from torch import nn

from autocastfx.errors import UnsupportedError
from benchmarks.command import DTYPES, Command, settings_of
from benchmarks.models.families import FullModel
from benchmarks.models.followed import FOLLOWED, STEPS, Followed
from benchmarks.store import Store
from benchmarks.training import AUTOCAST, DEFAULT, FASTEST, FLOAT32, HALF, Setting, training

SEEDS, LAST, DIGITS = 3, 20, 6
CONTROL, MASTERS = "float32, rounded start", "pure half, masters"
OURS = (DEFAULT, FASTEST)
# By side: which of training.SIDES it is.
SIDES = {
    **{FLOAT32: FLOAT32, CONTROL: FLOAT32, AUTOCAST: AUTOCAST, DEFAULT: DEFAULT, FASTEST: FASTEST},
    **{MASTERS: HALF, HALF: HALF},
}


@dataclass(frozen=True)
class Run:
    """A training run: its losses in nats, step by step, or a note why they are missing; ``seconds`` is informative."""

    model: str
    side: str
    seed: int
    losses: Sequence[float] = ()
    seconds: float = 0.0
    note: str = ""


def follow(name: str, followed: Followed, side: str, seed: int, setting: Setting) -> Run:
    """Train one side from one seed."""
    started = time.perf_counter()
    model = followed.model(seed)
    if side == CONTROL:
        model = FullModel(lambda: _rounded(followed.model(seed).build(), setting.dtype), model.inputs)
    try:
        made = training(SIDES[side], model, setting, masters="float32" if side == MASTERS else "")
    except UnsupportedError as error:
        return Run(name, side, seed, note=f"not there yet: {str(error).splitlines()[0]}")
    losses = []
    for step, batch in enumerate(followed.batches(seed)):
        for group in made.optimizer.param_groups:
            group["lr"] = followed.task.rate_at(step)
        for key, tensor in batch.items():
            made.inputs[key] = tensor.to(made.inputs[key])
        loss, logits = made.forward()[:2]
        made.backward(loss)
        made.step()
        losses.append(followed.loss(logits.detach(), made.inputs["labels"]))
    found = [round(loss, DIGITS) for loss in torch.stack(losses).tolist()]
    return Run(name, side, seed, found, round(time.perf_counter() - started, 2))


@torch.no_grad()
def _rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    return model


@dataclass(frozen=True)
class Row:
    """A side of a model: distance and end of each seed in nats, and the distances divided by torch.autocast's."""

    model: str
    side: str
    distances: Sequence[float]
    ends: Sequence[float]
    to_autocast: Sequence[float] = ()


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the root mean square of the differences: at least the rounding of losses; infinite if one is."""
    square = fmean((a - b) ** 2 for a, b in zip(losses, others, strict=True))
    return max(math.sqrt(square), 10**-DIGITS) if math.isfinite(square) else math.inf


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each model and side, over the seeds that also float32 and torch.autocast have."""
    held = {(run.model, run.side, run.seed): run.losses for run in runs if not run.note}
    found = []
    for model in dict.fromkeys(run.model for run in runs):
        for side in SIDES:
            seeds = [s for m, its, s in held if (m, its) == (model, side)]
            whole = [s for s in seeds if {(model, FLOAT32, s), (model, AUTOCAST, s)} <= held.keys()]
            if side == FLOAT32 or not whole:
                continue
            mine, exact, cast = ([held[model, name, s] for s in whole] for name in (side, FLOAT32, AUTOCAST))
            distances = list(map(distance, mine, exact))
            ends = [fmean(a[-LAST:]) - fmean(b[-LAST:]) for a, b in zip(mine, exact, strict=True)]
            to_autocast = [d / other for d, other in zip(distances, map(distance, cast, exact), strict=True)]
            found.append(Row(model, side, distances, ends, to_autocast))
    return found


def spread(found: Sequence[Row]) -> float:
    """Return the standard deviation over seeds of log(torch.autocast's distance), root mean square over models."""
    logarithms = [
        list(map(math.log, row.distances)) for row in found if row.side == AUTOCAST and len(row.distances) > 1
    ]
    return math.sqrt(fmean(map(variance, logarithms))) if logarithms else math.nan


def targets(found: Sequence[Row]) -> list[tuple[str, bool]]:
    """Return the targets that ``found`` allows to check: a description, the figure, and True if it is met."""
    told, s = list[tuple[str, bool]](), spread(found)
    for side in OURS:
        ratios = [ratio for row in found if row.side == side for ratio in row.to_autocast]
        if ratios and math.isfinite(s):
            limit, mean = math.exp(2 * s * math.sqrt(2 / len(ratios))), geometric_mean(ratios)
            what = f"{side}: {mean:.2f} times {AUTOCAST}'s distance in the geometric mean"
            told.append((f"{what} ({min(ratios):.2f} to {max(ratios):.2f}), at most {limit:.2f}", mean <= limit))
    return told


_HEADER = f"{'model':<12} {'side':<23} {'distance of each seed':<23} {'to autocast':>11}  at the end, of each seed"


def table(runs: Sequence[Run]) -> str:
    """Write the table to print: the fall of float32's losses, each side's distance, and the targets."""
    lines, found = [_HEADER], rows(runs)
    for model in dict.fromkeys(run.model for run in runs):
        exact = [run.losses for run in runs if run.model == model and run.side == FLOAT32]
        falls = (f"{losses[0]:.3f} to {fmean(losses[-LAST:]):.3f}" for losses in exact)
        lines.append(f"{model:<12} {FLOAT32:<23} falls from {', '.join(falls)}")
        lines += [_line(row) for row in found if row.model == model]
    lines += dict.fromkeys(f"{run.model}, {run.side}: {run.note}" for run in runs if run.note)
    told = (f"{'reached' if reached else 'MISSED '}  {what}" for what, reached in targets(found))
    return "\n".join([*lines, "", *told])


def _line(row: Row) -> str:
    each, ends = " ".join(f"{d:.5f}" for d in row.distances), " ".join(f"{e:+.4f}" for e in row.ends)
    return f"{row.model:<12} {row.side:<23} {each:<23} {geometric_mean(row.to_autocast):>11.2f}  {ends}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the missing runs among those asked for, and print the table of all runs."""
    command = Command("losses", __doc__)
    command.names("--models", FOLLOWED)
    command.number("--seeds", SEEDS, 2, "a spread needs two or more")
    command.device()
    options = command.begin(arguments)
    store = Store(options.json, Run, {"steps": STEPS, **settings_of(options, "dtype")})
    setting = Setting(options.device, DTYPES[options.dtype])
    sides = [side for side in SIDES if side != HALF or options.dtype != "float16"]
    asked = ((name, side, seed) for name in options.models for seed in range(options.seeds) for side in sides)
    store.fill(asked, "model side seed", lambda run: [follow(run[0], FOLLOWED[run[0]], *run[1:], setting)])
    print(table(store.rows))
    return int(not all(reached for _, reached in targets(rows(store.rows))))


if __name__ == "__main__":
    sys.exit(main())
