"""How the error of a tuned plan changes in the course of training, by when it was tuned.

    python -m benchmarks.tune_drift [--models "char GPT"] [--dtypes bfloat16] [--json PATH]

Plans are tuned as in :mod:`benchmarks.tune_training`, after 40 steps and after half of the 500. Then a float32 model is
trained from other weights and on other batches. At some of its steps, the error of the gradient is measured on six
fixed batches that are not trained on. For each plan: the bytes that it moves, and its error at these steps, over the
default list's.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import autocastfx
from autocastfx.numerics.compare import TargetError
from autocastfx.numerics.logprob_gap import loss_of
from benchmarks.store import Store
from benchmarks.tune_models import MODELS, Case
from benchmarks.tune_training import CHOSEN, STEPS, batches, fresh, inputs_of, rate_at, steps_of, tuned_list

__all__ = ["Row", "main", "measure", "table"]

AFTER, STAGES = (40, STEPS // 2), (0, 40, 100, 200, 300, 400, STEPS)
FIXED_SEED, FIXED = 1000, 6


@dataclass(frozen=True)
class Row:
    """A plan tuned after some steps: its bytes and, at each stage, its error, over the default list's."""

    model: str
    dtype: str
    after: int
    bytes: float
    errors: Sequence[float]


def measure(name: str, dtype: str) -> list[Row]:
    """Tune after each number of steps, and follow the errors of the plans."""
    case, low = MODELS[name], getattr(torch, dtype)
    lists = {after: tuned_list(case, dtype, after) for after in AFTER}
    fixed = list(itertools.islice(batches(case, FIXED_SEED), FIXED))
    errors: dict[int, list[float]] = {after: [] for after in AFTER}
    moved: dict[int, float] = {}
    for model in _stages(case):
        judge = TargetError(model, fixed, case.loss, "gradient", case.inputs)
        default = autocastfx.convert(model, inputs_of(case, fixed[0]), dtype=dtype)
        of_default = judge(default, low)
        for after, op_list in lists.items():
            tuned = autocastfx.convert(model, inputs_of(case, fixed[0]), dtype=dtype, op_list=op_list)
            errors[after].append(judge(tuned, low) / of_default)
            moved[after] = tuned.plan.traffic.moved / default.plan.traffic.moved
    return [Row(name, dtype, after, moved[after], errors[after]) for after in AFTER]


def _stages(case: Case) -> Iterator[nn.Module]:
    """Train in float32, and yield the model at each stage, the last after all steps."""
    model = fresh(case, 0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for step, batch in steps_of(case, 0):
        if step in STAGES:
            optimizer.zero_grad()
            yield model
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        optimizer.zero_grad()
        loss_of(case.call(model, batch), batch, case.loss).backward()
        optimizer.step()
    optimizer.zero_grad()
    yield model


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with the largest error of each time of tuning."""
    steps = "".join(f"{step:>6}" for step in STAGES)
    lines = [
        f"{'':12}{'':>10}{'tuned':>8}{'':>7}  error after steps",
        f"{'model':12}{'dtype':>10}{'after':>8}{'bytes':>7}{steps}",
    ]
    lines += [
        f"{row.model:12}{row.dtype:>10}{row.after:>8}{row.bytes:>7.2f}" + "".join(f"{e:>6.2f}" for e in row.errors)
        for row in rows
    ]
    lines.append("")
    for after in AFTER:
        largest = max((max(row.errors) for row in rows if row.after == after), default=0.0)
        lines.append(f"Tuned after {after} steps: at most {largest:.2f} times the default list's error.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models chosen, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CHOSEN), help="separated by commas")
    parser.add_argument("--dtypes", default="bfloat16", help="separated by commas")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    names = chosen.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = Store(chosen.json, Row, {"transformers": __import__("transformers").__version__, "steps": STEPS})
    done = {(row.model, row.dtype) for row in store.rows}
    for name, dtype in itertools.product(names, chosen.dtypes.split(",")):
        if (name, dtype) not in done:
            store.extend(measure(name, dtype))
            print(f"{name}, {dtype}: done", file=sys.stderr, flush=True)
    print(table(store.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
