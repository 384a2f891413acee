"""Time what ``autocastfx.watch`` adds to a training step.

    python -m benchmarks.watch [--models "GPT-2 4x256"] [--every 100] [--rounds 60] [--json PATH]

One model in bfloat16 trains in three ways that take turns: without a watch; watched, a step that is not observed; and
watched, a step that is observed and whose counts are read. A step is forward, backward, fused AdamW and ``watch.step``.
The ratio of a round is that of ``every`` watched steps, one of them observed, to as many without a watch: medians, with
quartiles. Times are CPU time of the one thread. All ways use the same tensors: another model's addresses alone make it
some percent faster or slower.

The exit status is 1 if a median is above the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch

import autocastfx
from autocastfx.numerics.watch import Watch
from benchmarks.small_models import SMALL
from benchmarks.store import Store
from benchmarks.timing import keep_memory, milliseconds, turns
from benchmarks.training import DEFAULT, Setting, Training, training

__all__ = ["LIMIT", "Row", "main", "measured"]

LIMIT = 1.02
PLAIN, WATCHED, OBSERVED = "plain", "watched", "observed"


@dataclass(frozen=True)
class Row:
    """A model: milliseconds of a step in each way, the nodes counted, and quartiles of the ratio over rounds."""

    model: str
    nodes: int
    plain_ms: float
    watched_ms: float
    observed_ms: float
    ratio: Sequence[float]


def measured(name: str, every: int, rounds: int) -> Row:
    """Measure the model called ``name``."""
    made = training(DEFAULT, SMALL[name], Setting("cpu", torch.bfloat16))
    if not isinstance(made.model, autocastfx.AmpModule):
        raise TypeError(f"{name} is not converted")
    found: dict[str, list[float]] = {PLAIN: [], WATCHED: [], OBSERVED: []}
    nodes = 0
    for is_counted, way in turns(list(found), rounds):
        watch = autocastfx.watch(made.model, every=sys.maxsize) if way != PLAIN else None
        if watch is not None and way == WATCHED:
            watch.step()  # the first one would be observed
        taken = milliseconds(_step(made, watch), "cpu")
        if watch is not None:
            nodes = len(watch.rows)
            watch.stop()
        if is_counted:
            found[way].append(taken)
    ratios = [
        ((every - 1) * watched + observed) / (every * plain)
        for plain, watched, observed in zip(found[PLAIN], found[WATCHED], found[OBSERVED], strict=True)
    ]
    times = (round(median(found[way]), 2) for way in (PLAIN, WATCHED, OBSERVED))
    return Row(name, nodes, *times, ratio=[round(quartile, 4) for quartile in quantiles(ratios, n=4)])


def _step(made: Training, watch: Watch | None) -> Callable[[], object]:
    """Return a function that makes a step, and reads what it has counted."""

    def run() -> object:
        made.forward_and_backward()
        made.step()
        if watch is None:
            return None
        watch.step()
        return watch.rows

    return run


def table(rows: Sequence[Row], every: int) -> str:
    """A line for each model."""
    lines = [f"{'model':14}{'nodes':>6}{'plain':>10}{'watched':>10}{'observed':>10}  ratio at every={every}"]
    for row in rows:
        times = "".join(f"{taken:7.1f} ms" for taken in (row.plain_ms, row.watched_ms, row.observed_ms))
        lines.append(
            f"{row.model:14}{row.nodes:6}{times}  {row.ratio[1]:.4f} ({row.ratio[0]:.4f} to {row.ratio[2]:.4f})"
        )
    return "\n".join(lines)


def above(rows: Sequence[Row]) -> list[str]:
    """The limits that are not kept, with the figures."""
    return [
        f"{row.model}: a watched step takes {row.ratio[1]:.4f} of one that is not, more than {LIMIT}"
        for row in rows
        if row.ratio[1] > LIMIT
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="GPT-2 4x256,BERT 4x256,U-Net 64", help="separated by commas")
    parser.add_argument("--every", type=int, default=100, help="as for watch; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="the store of rows")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in SMALL]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(SMALL)}")
    if options.rounds < 2 or options.every < 1:
        parser.error("--rounds is two or more, which quartiles need, and --every one or more")
    torch.set_num_threads(1)
    keep_memory()
    store = Store(options.json, Row, {"rounds": options.rounds, "every": options.every})
    held = {row.model for row in store.rows}
    for name in (name for name in names if name not in held):
        print(f"{name} ...", file=sys.stderr, flush=True)
        store.extend([measured(name, options.every, options.rounds)])
    print(table(store.rows, options.every))
    failed = above(store.rows)
    print(*failed, sep="\n", end="\n" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
