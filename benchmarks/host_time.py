"""Time what the host does: for forward and backward, for a watched step, and from the import to a first dump.

    python -m benchmarks.host_time [--models "BERT 12 layers"] [--rounds 15] [--json PATH]
    python -m benchmarks.host_time --watch [--watched "GPT-2 4x256"] [--every 100] [--rounds 60] [--json PATH]
    python -m benchmarks.host_time --first-dump 15

By default models are so small that kernels take next to nothing. Sides: the float32 model; the same under
torch.autocast; converted, with casts and with working copies; and what ``freeze`` gives of the former. All in training
mode, forward and backward. The sides take turns, each round
starting with another; a side's ratio is its time divided by the other's in the same round: medians, with quartiles.
Times are CPU time of the one thread.

With ``--watch``, one model in bfloat16 trains in three ways that take turns: without a watch; watched, a step that is
not observed; and watched, a step that is observed and whose counts are read. A step is forward, backward, fused AdamW
and ``watch.step``. The ratio of a round is that of ``every`` watched steps, one of them observed, to as many without a
watch. All ways use the same tensors: another model's addresses alone make it some percent faster or slower.

``--first-dump`` is a first look at BERT-base as a newcomer has it. A new process imports torch and autocastfx, makes
the model of transformers with random weights (which is not counted), converts it for training and evaluation, and dumps
it, within so many seconds. Its standard error is a terminal, which must show lines of progress.

The exit status is 1 if something is above its limit.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import AmpModule
from autocastfx.numerics.watch import Watch
from benchmarks.command import Command, verdict
from benchmarks.models.families import FullModel, ResNet50, bert, vit
from benchmarks.models.small import SMALL
from benchmarks.store import Store
from benchmarks.timing import milliseconds, ratios, spread, timed, turns
from benchmarks.training import AUTOCAST, DEFAULT, FLOAT32, Setting, Training, training

CACHED, FROZEN = "cached, fold=exact", "frozen"
SIDES = (FLOAT32, AUTOCAST, DEFAULT, CACHED, FROZEN)
LIMITS = ((DEFAULT, AUTOCAST, 1.0), (CACHED, DEFAULT, 1.0), (FROZEN, AUTOCAST, 1.0))
CALLS = 5  # of a side in its turn
BARE, WATCHED, OBSERVED = "plain", "watched", "observed"
WATCH_LIMIT = 1.02

# ---- a forward ------------------------------------------------------------------------------------------------------

_VIT = {"intermediate_size": 16, "image_size": 16, "patch_size": 8}


class _MLP(nn.Module):
    def __init__(self, layers: int = 16, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x).mean(),)


def _tokens() -> dict[str, Tensor]:
    ids = torch.arange(8)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.long)}


MODELS: dict[str, FullModel] = {
    "MLP 16 layers": FullModel(_MLP, lambda: {"x": torch.zeros(1, 16)}),
    "BERT 12 layers": FullModel(partial(bert, 16, 12, 2, 32, intermediate_size=16), _tokens),
    "ViT 12 layers": FullModel(partial(vit, 16, 12, 2, 4, **_VIT), lambda: _images(1, 16)),
    "ResNet-50": FullModel(lambda: ResNet50(width=8, classes=4), lambda: _images(2, 32)),
}


@dataclass(frozen=True)
class Row:
    """A side of a model: milliseconds of forward and backward, and quartiles of its ratios in a round to the others."""

    model: str
    side: str
    ms: float
    to: Mapping[str, Sequence[float]]


def measured(name: str, rounds: int) -> list[Row]:
    """A row for each side."""
    found = timed({side: _repeated(call) for side, call in _calls(MODELS[name]).items()}, rounds)
    others = {side: [other for one, other, _ in LIMITS if one == side] for side in SIDES}
    return [
        Row(name, side, round(median(times) / CALLS, 4), {other: ratios(times, found[other]) for other in others[side]})
        for side, times in found.items()
    ]


def _repeated(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: [call() for _ in range(CALLS)]


def _calls(full: FullModel) -> dict[str, Callable[[], object]]:
    setting = Setting("cpu", torch.bfloat16)
    made = {side: training(side, full, setting) for side in SIDES if side != FROZEN}
    ours: Any = made[DEFAULT]
    frozen = ours.model.freeze(**ours.inputs)
    sides = {**made, FROZEN: replace(ours, forward=lambda: frozen(**ours.inputs))}
    return {side: one.forward_and_backward for side, one in sides.items()}


def above(rows: Sequence[Row]) -> list[str]:
    """The limits that are not kept, with the figures."""
    return [
        f"{row.model}: {side} takes {row.to[other][1]:.3f} of {other}, more than {limit}"
        for row in rows
        for side, other, limit in LIMITS
        if row.side == side and row.to[other][1] > limit
    ]


def table(rows: Sequence[Row]) -> str:
    """A line for each side."""
    lines = ["model           side                  ms      of the other side, median (quartiles)"]
    for row in rows:
        shown = "; ".join(f"{other} {spread(quartiles, 3)}" for other, quartiles in row.to.items())
        lines.append(f"{row.model:15} {row.side:20} {row.ms:7.3f}  {shown}".rstrip())
    return "\n".join(lines)


# ---- a watched step -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchRow:
    """A model: milliseconds of a step in each way, the nodes counted, and quartiles of the ratio over rounds."""

    model: str
    nodes: int
    plain_ms: float
    watched_ms: float
    observed_ms: float
    ratio: Sequence[float]


def watched(name: str, every: int, rounds: int) -> WatchRow:
    """Measure the model called ``name`` in all ways."""
    made = training(DEFAULT, SMALL[name], Setting("cpu", torch.bfloat16))
    if not isinstance(made.model, AmpModule):
        raise TypeError(f"{name} is not converted")
    found: dict[str, list[float]] = {BARE: [], WATCHED: [], OBSERVED: []}
    nodes = 0
    for is_counted, way in turns(list(found), rounds):
        watch = autocastfx.watch(made.model, every=sys.maxsize) if way != BARE else None
        if watch is not None and way == WATCHED:
            watch.step()  # the first one would be observed
        taken = milliseconds(_step(made, watch), "cpu")
        if watch is not None:
            nodes = len(watch.rows)
            watch.stop()
        if is_counted:
            found[way].append(taken)
    rounds_of = zip(*found.values(), strict=True)
    quartiles = quantiles([((every - 1) * one + other) / (every * bare) for bare, one, other in rounds_of], n=4)
    times = (round(median(taken), 2) for taken in found.values())
    return WatchRow(name, nodes, *times, ratio=[round(quartile, 4) for quartile in quartiles])


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


def watch_table(rows: Sequence[WatchRow]) -> str:
    """A line for each model."""
    lines = [f"{'model':14}{'nodes':>6}{'plain':>10}{'watched':>10}{'observed':>10}  ratio"]
    for row in rows:
        times = "".join(f"{taken:7.1f} ms" for taken in (row.plain_ms, row.watched_ms, row.observed_ms))
        lines.append(f"{row.model:14}{row.nodes:6}{times}  {spread(row.ratio, 4)}")
    return "\n".join(lines)


# ---- a first dump ---------------------------------------------------------------------------------------------------

SCRIPT = """
import time

started = time.perf_counter()
import torch

import autocastfx

imported = time.perf_counter()
from transformers import BertConfig, BertForMaskedLM

model = BertForMaskedLM(BertConfig(num_hidden_layers={layers}))
made = time.perf_counter()
ids = torch.zeros(2, 64, dtype=torch.int64)
inputs = {{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}}
amp_model = autocastfx.convert(model, inputs, dtype="bfloat16")
converted = time.perf_counter()
autocastfx.dump(amp_model)
done = time.perf_counter()
print(imported - started, converted - made, done - converted)
"""


def first_dump(limit: float, layers: int) -> int:
    """Time the import, the conversion and the dump once, in a new process; return the exit status."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SCRIPT.format(layers=layers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    seen = b""
    try:
        while read := os.read(ours, 4096):
            seen += read
    except OSError:  # the terminal is closed: the process has ended
        pass
    os.close(ours)
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(seen.decode())
    times = [float(word) for word in out.split()]
    lines = re.findall(r"autocastfx: ([^\r]+?) …", seen.decode())
    print(*(f"shown: {line}" for line in lines), sep="\n")
    print("import {:.1f} s, convert {:.1f} s, dump {:.1f} s".format(*times))
    held = sum(times) <= limit and bool(lines)
    print(f"{'reached' if held else 'MISSED '}  {sum(times):.1f} s from import to dump; at most {limit:g}")
    return int(not held)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for."""
    command = Command("host_time", __doc__)
    command.names("--models", MODELS)
    command.number("--rounds", 0, 2, "quartiles need two or more")
    command.add_argument("--watch", action="store_true", help="time watched steps instead")
    command.names("--watched", SMALL, chosen=("GPT-2 4x256", "BERT 4x256", "U-Net 64"))
    command.number("--every", 100)
    command.add_argument("--first-dump", type=float, metavar="SECONDS", help="time a first dump instead")
    command.number("--layers", 12)
    options = command.begin(arguments, is_timed=True)
    if options.first_dump is not None:
        return first_dump(options.first_dump, options.layers)
    if options.watch:
        rounds, every = options.rounds or 60, options.every
        watches = Store(options.json, WatchRow, {"rounds": rounds, "every": every})
        watches.fill(options.watched, "model", lambda name: [watched(name, every, rounds)])
        told = (f"{row.model}: a watched step takes {row.ratio[1]:.4f} of one that is not" for row in watches.rows)
        slow = [text for text, row in zip(told, watches.rows, strict=True) if row.ratio[1] > WATCH_LIMIT]
        return verdict(watch_table(watches.rows), slow)
    rounds = options.rounds or 15
    store = Store(options.json, Row, {"rounds": rounds})
    store.fill(options.models, "model", lambda name: measured(name, rounds))
    return verdict(table(store.rows), above(store.rows))


if __name__ == "__main__":
    sys.exit(main())
