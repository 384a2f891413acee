"""Train by tuned plans, and compare the float32 loss that they reach with what the default list reaches.

    python -m benchmarks.tune_training [--models "char GPT"] [--dtypes bfloat16] [--seeds 5] [--json PATH]

``tune`` promises a gradient at one point of training. This trains 500 steps: in float32, by the default list, and by
the plan of ``tune(budget="default")``. The plan is tuned once for each model and dtype, on weights and batches that no
run uses, after half of the steps, because what 16 bits cost changes in training (:mod:`benchmarks.tune_drift`). It is
judged on eight batches: two let plans through by chance that had more error than the default list on others. Within
a seed all sides start with the same weights and see the same batches, with the same AdamW and learning rates, which
rise for 50 steps and fall to 0 along a cosine. float16 losses are scaled by ``LossScalingOptimizer``.

The *loss* of a run is that of its trained weights, computed in float32, over 32 fixed batches that are not trained on
(of the digits, the images are those trained on). The *distance* is the absolute difference of a run's loss from that of
the float32 run of the same seed. ``rounded`` is the control: float32 from weights that were rounded once to 16 bits,
which shows how much training itself amplifies a difference. ``spread`` is the standard deviation of float32's loss over
the seeds.

How it is decided, fixed before anything was run, is in :mod:`benchmarks.tune_training_table`.

Models on which ``tune`` finds no fewer bytes are shown, and not judged. The exit status is 1 if the line is missed.
With ``--json`` runs are written seed by seed, and runs of the same commit are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx import OpList
from autocastfx.numerics.logprob_gap import loss_of
from benchmarks.accuracy_tasks import DigitsViT
from benchmarks.store import Store
from benchmarks.tune_models import MODELS, Case, trained
from benchmarks.tune_training_table import DEFAULT, DTYPES, FLOAT32, ROUNDED, SEEDS, TUNED, Run, reached, rows, table

__all__ = [
    "CHOSEN",
    "STEPS",
    "batches",
    "fresh",
    "inputs_of",
    "main",
    "rate_at",
    "steps_of",
    "tuned_list",
]

STEPS, MEASURED, HELD_OUT, FIXED = 500, 3, 8, 32
CHOSEN = ("char GPT", "digits ViT", "GPT-2 2x64", "Llama 2x64")
_FIRST_SEED, _TUNING_SEED, _FIXED_SEED = 100, 1, 1000  # of weights and batches; 0 is the warm-up of tuning


def batches(case: Case, seed: int) -> Iterator[Any]:
    """Yield the model's batches, each cut in half: float16 products are slow on a CPU."""
    return (pytree.tree_map(_half, batch) for batch in case.batches(seed))


def _half(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2]


def tuned_list(case: Case, dtype: str, after: int) -> OpList:
    """Tune for the model after some steps, on weights and batches that no run uses."""
    given = itertools.islice(batches(case, _TUNING_SEED), MEASURED + HELD_OUT)
    model = trained(case, after)
    options: dict[str, Any] = {"loss_fn": case.loss, "inputs": case.inputs, "held_out": HELD_OUT, "progress": False}
    return autocastfx.tune(model, given, dtype=dtype, **options).op_list


def train(name: str, dtype: str, side: str, seed: int, op_list: OpList | None = None) -> Run:
    """Train one side from one seed."""
    started, case = time.perf_counter(), MODELS[name]
    model = fresh(case, seed)
    if side == ROUNDED:
        _round(model, getattr(torch, dtype))
    called, moved = model, 0
    if side in (DEFAULT, TUNED):
        inputs = inputs_of(case, next(batches(case, _FIRST_SEED + seed)))
        called = autocastfx.convert(model, inputs, dtype=dtype, op_list=op_list or "default")
        moved = called.plan.traffic.moved
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaled = dtype == "float16" and called is not model
    optimizer = autocastfx.LossScalingOptimizer(optimizer) if scaled else optimizer
    skipped = 0
    for step, batch in steps_of(case, seed):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        optimizer.zero_grad()
        loss = loss_of(case.call(called, batch), batch, case.loss)
        optimizer.backward(loss) if scaled else loss.backward()
        optimizer.step()
        skipped += scaled and optimizer.last_step.skipped
    return Run(name, dtype, side, seed, _loss(model, case), moved, skipped, round(time.perf_counter() - started, 2))


def fresh(case: Case, seed: int) -> nn.Module:
    """Build the model with the weights of a seed."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_FIRST_SEED + seed)
        return case.build().train()


def steps_of(case: Case, seed: int) -> Iterator[tuple[int, Any]]:
    """Yield each step with its batch.

    Raises:
        ValueError: the batches end before the steps do.
    """
    given = batches(case, _FIRST_SEED + seed)
    for step in range(STEPS):
        if (batch := next(given, None)) is None:
            raise ValueError(f"the batches of seed {seed} end after {step} steps of {STEPS}")
        yield step, batch


def rate_at(step: int) -> float:
    """Return the learning rate of a step."""
    return DigitsViT(steps=STEPS, batch=0, rate=1e-3).rate_at(step)


@torch.no_grad()
def _round(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def inputs_of(case: Case, batch: Any) -> Any:
    """Return the example inputs of a batch for ``convert``."""
    given = batch if case.inputs is None else case.inputs(batch)
    return given if isinstance(given, dict) else (given,)


def _loss(model: nn.Module, case: Case) -> float:
    """The loss of the float32 model, in evaluation mode, over the fixed batches."""
    model.eval()
    fixed = itertools.islice(batches(case, _FIXED_SEED), FIXED)
    return fmean(float(loss_of(case.call(model, batch), batch, case.loss).detach()) for batch in fixed)


def train_all(names: Sequence[str], dtypes: Sequence[str], seeds: int, store: Store[Run]) -> None:
    """Train the runs that are not in ``store``; the sides of a seed follow one another."""
    held = {(run.model, run.dtype, run.side, run.seed) for run in store.rows}
    for name, seed in itertools.product(names, range(seeds)):
        if (name, FLOAT32, FLOAT32, seed) not in held:
            store.extend([train(name, FLOAT32, FLOAT32, seed)])
    for name, dtype in itertools.product(names, dtypes):
        missing = [seed for seed in range(seeds) if (name, dtype, TUNED, seed) not in held]
        op_list = tuned_list(MODELS[name], dtype, STEPS // 2) if missing else None
        for seed in missing:
            sides = {ROUNDED: None, DEFAULT: None, TUNED: op_list}
            made = [train(name, dtype, side, seed, lists) for side, lists in sides.items()]
            store.extend(made)
            said = ", ".join(f"{run.side} {run.loss:.5f}" for run in made)
            seconds = sum(run.seconds for run in made)
            print(f"{name}, {dtype}, seed {seed}: {said}, {seconds:.0f} s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the missing runs among those asked for, and print the table of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CHOSEN), help="separated by commas")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    names = chosen.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if chosen.seeds < 2:
        parser.error("--seeds: a standard error needs two or more")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings = {"transformers": __import__("transformers").__version__, "steps": STEPS}
    store = Store(chosen.json, Run, settings)
    train_all(names, chosen.dtypes.split(","), chosen.seeds, store)
    print(table(store.rows))
    return int(not reached(rows(store.rows)))


if __name__ == "__main__":
    sys.exit(main())
