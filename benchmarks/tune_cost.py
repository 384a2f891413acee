"""The time and memory that a measurement of sensitivity takes, for models of several sizes.

    python -m benchmarks.tune_cost [--json PATH]

GPT-2 on characters, 8 sequences of 64. ``evaluations``: time of a batch's measurement with 8 probes, in
evaluations of the gradient. ``memory``: its peak over that of a float32 training step with AdamW, parameters included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

import autocastfx
from autocastfx import Sensitivity
from autocastfx.numerics.loss import loss_of
from autocastfx.numerics.sensitivity import Measuring
from benchmarks.store import Store
from benchmarks.tune_models import Case, gpt2, trained

__all__ = ["Row", "main", "measured_cost", "table"]

WIDTHS, LAYERS, STEPS, BATCHES = (64, 256), (2, 6, 12, 24), 2, 3
MOST_EVALUATIONS, MOST_MEMORY = 50, 3


@dataclass(frozen=True)
class Row:
    """What one model costs."""

    width: int
    layers: int
    evaluations: float
    memory: float


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with how many are within the limits."""
    lines = [f"{'width':>5}{'layers':>8}{'evaluations':>13}{'memory':>9}"]
    lines += [f"{row.width:>5}{row.layers:>8}{row.evaluations:>13.0f}{f'{row.memory:.2f}x':>9}" for row in rows]
    times = sum(row.evaluations <= MOST_EVALUATIONS for row in rows)
    sizes = sum(row.memory <= MOST_MEMORY for row in rows)
    lines += [
        "",
        f"At most {MOST_EVALUATIONS} evaluations: {times} of {len(rows)}. "
        f"At most {MOST_MEMORY} times the memory of a step: {sizes} of {len(rows)}.",
    ]
    return "\n".join(lines)


def measured_cost(model: nn.Module, case: Case, batches: Sequence[Any], dtype: str) -> tuple[Sensitivity, float, float]:
    """Measure sensitivity, its time in gradient evaluations a batch, and its peak memory over a step's."""
    args, kwargs = case.arguments(batches[0])
    amp_model = autocastfx.convert(model, args, kwargs or None, dtype=dtype)
    measuring = Measuring(amp_model, case.loss, "gradient", 8, case.inputs)
    measuring.add(batches[0])  # captures what is to be captured
    one = min(_timed(lambda: _gradients(model, case, batches[0])) for _ in range(5))
    measuring.found = None
    each = [_timed(lambda batch=batch: measuring.add(batch)) for batch in batches]
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    again = Measuring(amp_model, case.loss, "gradient", 8, case.inputs)
    peak = _peak(lambda: again.add(batches[0]))

    def step() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.0)
        loss_of(case.call(model, batches[0]), batches[0], case.loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    buffers = [(b, b.clone()) for b in model.buffers()]
    of_step = _peak(step)
    for buffer, before in buffers:
        buffer.data.copy_(before)
    assert measuring.found is not None
    return measuring.found, statistics.median(each) / one, (held + peak) / (held + of_step)


def _gradients(model: nn.Module, case: Case, batch: Any) -> None:
    loss = loss_of(case.call(model, batch), batch, case.loss)
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _timed(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak(work: Any) -> int:
    """The most bytes allocated at a time by ``work``, beyond what was before."""
    with profile(profile_memory=True) as recorded:
        work()
    events: Iterable[Any] = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each size, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = Store(chosen.json, Row, {"transformers": __import__("transformers").__version__})
    done = {(row.width, row.layers) for row in store.rows}
    for width, layers in (size for size in itertools.product(chosen.widths, chosen.layers) if size not in done):
        case = gpt2(layers, width)
        _, evaluations, memory = measured_cost(
            trained(case, STEPS), case, list(itertools.islice(case.batches(1), BATCHES)), "bfloat16"
        )
        store.extend([Row(width, layers, evaluations, memory)])
        print(f"width {width}, {layers} layers: done", file=sys.stderr, flush=True)
    print(table(store.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
