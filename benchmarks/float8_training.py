"""Train with products in float8 for 300 steps, beside float32, bfloat16 and the usual rules, and compare the losses.

    python -m benchmarks.float8_training [--models "GPT-2*"] [--json PATH]

A GPT-2 of four blocks learns the source of Python's standard library from scratch, character by character; MiniLM is
fine-tuned to tell modules of the library by sentences of their docstrings. Within a seed all sides have the same start,
batches and AdamW. The loss is the mean over text that training does not see (every tenth file; 96 sentences), computed
as the side computes.

- ``but last`` and ``blocks``, as in ``benchmarks.float8``: the rules that are usual with torchao.
- ``tuned``: ``tune(float8=True, share=...)`` at the share of operations of ``blocks``, by the sensitivity of a model
  after 60 steps in float32.

A side's difference to float32 says nothing where it is no larger than that of bfloat16.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

import autocastfx
from autocastfx import OpList
from autocastfx.numerics.logprob_gap import loss_of
from benchmarks.command import Command, verdict
from benchmarks.float8 import MODELS, RECIPE, prepared, rules, without
from benchmarks.models import tuned
from benchmarks.models.tasks import source
from benchmarks.models.tuned import CONTEXT
from benchmarks.store import Store

STEPS, SEEDS, UNSEEN = 300, 2, 96
FLOAT32, BFLOAT16, TUNED = "float32", "bfloat16", "tuned"
RULES = ("but last", "blocks")
SIDES = (FLOAT32, BFLOAT16, *RULES, TUNED)


def _unseen_text() -> dict[str, Tensor]:
    _, text = source()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 2 * UNSEEN).long()
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:].contiguous()}


@dataclass(frozen=True)
class _Task:
    """Batches of a seed, and one batch that is none of theirs."""

    batches: Callable[[int], Iterator[Any]]
    unseen: Callable[[], Any]


TASKS: dict[str, _Task] = {
    "GPT-2 4x128": _Task(MODELS["GPT-2 4x128"].batches, _unseen_text),
    "MiniLM 6x384": _Task(
        lambda seed: tuned.sentences(seed, slice(UNSEEN, None)),
        lambda: next(tuned.sentences(0, slice(UNSEEN), UNSEEN)),
    ),
}


@dataclass(frozen=True)
class Run:
    """A training run: the loss after it in nats, and the share of operations that ran in float8."""

    model: str
    side: str
    seed: int
    loss: float
    share: float
    seconds: float


def lists_of(name: str) -> Mapping[str, tuple[float, Sequence[OpList | str]]]:
    """Return, by side, the share of operations in float8 and the op lists; none: the model itself."""
    bench = prepared(replace(MODELS[name], batches=TASKS[name].batches))
    left = rules(bench.paths())
    lists: dict[str, list[OpList | str]] = {rule: ["default", without(left[rule])] for rule in RULES}
    shares = {rule: bench.share(bench.converted(*made).plan.nodes) for rule, made in lists.items()}
    lists[TUNED] = [bench.tuned(shares["blocks"])]
    shares[TUNED] = bench.share(bench.converted(*lists[TUNED]).plan.nodes)
    return {FLOAT32: (0.0, ()), BFLOAT16: (0.0, ("default",)), **{side: (shares[side], lists[side]) for side in lists}}


def train(name: str, side: str, seed: int, share: float, lists: Sequence[OpList | str]) -> Run:
    """Train one side from one seed."""
    started = time.perf_counter()
    case, task = MODELS[name], TASKS[name]
    torch.manual_seed(seed)
    model = case.build().train()
    args, kwargs = case.arguments(unseen := task.unseen())
    called = model
    if lists:
        called = autocastfx.convert(model, args, kwargs or None, dtype="bfloat16", op_list=lists, check=False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), case.rate)
    for batch in itertools.islice(task.batches(2 + seed), STEPS):
        optimizer.zero_grad()
        loss_of(case.call(called, batch), batch, case.loss).backward()
        optimizer.step()
    loss = loss_of(case.call(called, unseen), unseen, case.loss).item()
    return Run(name, side, seed, loss, share, time.perf_counter() - started)


def table(runs: Sequence[Run]) -> str:
    """Return the losses as a table, with the differences to float32."""
    losses = {(run.model, run.side, run.seed): run.loss for run in runs}
    lines = [f"{'model':14}{'side':12}{'in float8':>10}" + "".join(f"{f'loss, seed {n}':>24}" for n in range(SEEDS))]
    for model, side in dict.fromkeys((run.model, run.side) for run in runs):
        share = next(run.share for run in runs if (run.model, run.side) == (model, side))
        cells = ""
        for seed in range(SEEDS):
            loss, base = (losses.get((model, one, seed)) for one in (side, FLOAT32))
            cells += f"{'-' if loss is None or base is None else f'{loss:.4f} ({loss - base:+.4f})':>24}"
        lines.append(f"{model:14}{side:12}{f'{share:.0%}':>10}{cells}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the models chosen, and print the table."""
    command = Command("float8_training", __doc__)
    command.add_argument("--models", default="*", help="a glob of names")
    chosen = command.begin(arguments)
    warnings.simplefilter("ignore")
    store = Store(chosen.json, Run, {"transformers": transformers.__version__, "recipe": RECIPE, "steps": STEPS})
    for name in fnmatch.filter(TASKS, chosen.models):
        if name in tuned.MODELS and name not in tuned.available():
            continue
        sides = [(name, side, seed) for seed in range(SEEDS) for side in SIDES]
        if set(sides) <= {(run.model, run.side, run.seed) for run in store.rows}:
            continue
        lists = lists_of(name)
        store.fill(sides, "model side seed", lambda one, lists=lists: [train(*one, *lists[one[1]])])
    return verdict(table(store.rows))


if __name__ == "__main__":
    sys.exit(main())
