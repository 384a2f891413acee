"""The time and memory that a measurement of sensitivity takes, for models of several sizes.

    python -m benchmarks.tune_cost [--json PATH]

GPT-2 on characters, 8 sequences of 64. A batch is measured with 8 probes. ``products`` and ``time``: the operations of
matrix products, as torch's FlopCounterMode counts them, and the time that this takes, in evaluations of the gradient,
which are timed before and after it. ``memory``: its peak over that of a float32 training step with AdamW, parameters
included in both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx import Sensitivity
from autocastfx.numerics.logprob_gap import loss_of
from autocastfx.numerics.sensitivity import Measuring
from benchmarks.store import Store
from benchmarks.tune_models import Case, gpt2, trained

__all__ = ["Cost", "Row", "main", "measured_cost", "table"]

WIDTHS, LAYERS, STEPS, BATCHES = (64, 256), (2, 6, 12, 24), 2, 3
EVALUATIONS = 7  # before and after each measurement
MOST_EVALUATIONS, MOST_MEMORY = 50, 3


@dataclass(frozen=True)
class Cost:
    """The cost of measuring one batch.

    Attributes:
        products: its operations of matrix products and convolutions, over those of an evaluation of the gradient.
        evaluations: its time, over that of an evaluation of the gradient.
        memory: its peak, over that of a training step, parameters included in both.
    """

    products: float
    evaluations: float
    memory: float

    @staticmethod
    def within(costs: Sequence[Cost]) -> str:
        """Say how many are within the limits."""
        products = sum(cost.products <= MOST_EVALUATIONS for cost in costs)
        times = sum(cost.evaluations <= MOST_EVALUATIONS for cost in costs)
        sizes, of = sum(cost.memory <= MOST_MEMORY for cost in costs), len(costs)
        return (
            f"At most {MOST_EVALUATIONS} gradient evaluations: {products} of {of} by products, {times} by time. "
            f"At most {MOST_MEMORY} times the memory of a training step: {sizes}."
        )


@dataclass(frozen=True)
class Row(Cost):
    """What one model costs."""

    width: int
    layers: int


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with how many are within the limits."""
    lines = [f"{'width':>5}{'layers':>8}{'products':>10}{'time':>7}{'memory':>9}"]
    lines += [f"{r.width:>5}{r.layers:>8}{r.products:>10.0f}{r.evaluations:>7.0f}{f'{r.memory:.2f}x':>9}" for r in rows]
    return "\n".join([*lines, "", Cost.within(rows)])


def measured_cost(model: nn.Module, case: Case, batches: Sequence[Any], dtype: str) -> tuple[Sensitivity, Cost]:
    """Measure sensitivity, and what that costs for a batch."""
    args, kwargs = case.arguments(batches[0])
    amp_model = autocastfx.convert(model, args, kwargs or None, dtype=dtype)
    measuring = Measuring(amp_model, case.loss, "gradient", 8, case.inputs)
    measuring.add(batches[0])  # captures what is to be captured
    measuring.found = None
    ratios: list[float] = []
    for batch in batches:
        before = _evaluation(model, case, batch)
        took = _timed(lambda batch=batch: measuring.add(batch))
        ratios.append(2 * took / (before + _evaluation(model, case, batch)))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    again = Measuring(amp_model, case.loss, "gradient", 8, case.inputs)
    peak = _peak(lambda: again.add(batches[0]))
    products = _products(lambda: again.add(batches[0])) / _products(lambda: _gradients(model, case, batches[0]))

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
    return measuring.found, Cost(products, statistics.median(ratios), (held + peak) / (held + of_step))


def _evaluation(model: nn.Module, case: Case, batch: Any) -> float:
    return statistics.median(_timed(lambda: _gradients(model, case, batch)) for _ in range(EVALUATIONS))


def _gradients(model: nn.Module, case: Case, batch: Any) -> None:
    loss = loss_of(case.call(model, batch), batch, case.loss)
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _timed(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _products(work: Any) -> int:
    """The operations of products and convolutions. A fused LSTM of oneDNN is none that is counted."""
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        work()
    return counter.get_total_flops()


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
        _, cost = measured_cost(
            trained(case, STEPS), case, list(itertools.islice(case.batches(1), BATCHES)), "bfloat16"
        )
        store.extend([Row(**asdict(cost), width=width, layers=layers)])
        print(f"width {width}, {layers} layers: done", file=sys.stderr, flush=True)
    print(table(store.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
