"""Measure inference: the time of a call and the memory of the weights, against float32 and torch.autocast.

    python -m benchmarks.inference [--models "BERT 4x256"] [--rounds 12] [--json PATH]
    python -m benchmarks.inference --device cuda --dtype float16 --json PATH

Models run in evaluation mode under ``torch.inference_mode``, and compute their loss as in a validation. Weight memory
counts parameters, buffers and working copies after a call. The sides take turns, and each round starts with another; a
side's ratio is its time divided by the other's in the same round: medians, with quartiles. CPU times are CPU time of
the one thread, so that other processes matter less; GPU times are synchronised wall time. ``pure half`` is
``model.half()`` or ``model.bfloat16()``. Outputs keep their computed dtype.

With ``--json`` each model is written at once; models measured at the same commit are skipped.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import torch

import autocastfx
from benchmarks.command import DTYPES, Command, settings_of, verdict
from benchmarks.models.families import FullModel
from benchmarks.models.small import SMALL
from benchmarks.store import Store
from benchmarks.timing import ratios, spread, timed

FLOAT32, AUTOCAST, HALF = "float32", "torch.autocast", "pure half"
# By side: the weights argument of convert; None is by hand.
SIDES: dict[str, str | None] = {
    FLOAT32: None,
    AUTOCAST: None,
    "cast": "cast",
    "cached": "cached",
    "low": "low",
    HALF: None,
}
ROUNDS = 12


@dataclass(frozen=True)
class Row:
    """A side of a model: bytes of its weights, milliseconds of a call, and quartiles of the ratios over rounds."""

    model: str
    side: str
    weights: int
    ms: float
    to_autocast: Sequence[float] = ()
    to_half: Sequence[float] = ()


def side(name: str, full: FullModel, device: str, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """Return a call of the model, and the bytes of its weights."""
    model: Any = full.build().to(device).eval()
    inputs = {key: tensor.to(device) for key, tensor in full.inputs().items()}
    if name == HALF:
        model.to(dtype)
        inputs = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in inputs.items()}
    weights = SIDES[name]
    if weights is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "float16 convolutions on a CPU")
            model = autocastfx.convert(model, (), inputs, dtype=dtype, weights=weights, keep_output_dtype=False)
            model.eval()

    def call() -> object:
        with torch.inference_mode(), torch.autocast(device, dtype) if name == AUTOCAST else contextlib.nullcontext():
            return model(**inputs)

    call()  # working copies are made in the first
    return call, weight_bytes(model)


def weight_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of the storages of parameters, buffers and working copies, each once."""
    copies: Any = getattr(model, "_working_copies", None)
    held = [*model.parameters(), *model.buffers()]
    if copies is not None:
        held += [copy.tensor for copy in copies.held.values()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in held}
    return sum(storage.nbytes() for storage in storages.values())


def measure(name: str, device: str, dtype: torch.dtype, rounds: int) -> list[Row]:
    """Return a row for each side."""
    made = {which: side(which, SMALL[name], device, dtype) for which in SIDES}
    found = timed({which: call for which, (call, _) in made.items()}, rounds, device)
    return [
        Row(
            name,
            which,
            weights,
            round(median(found[which]), 2),
            ratios(found[which], found[AUTOCAST]),
            ratios(found[which], found[HALF]),
        )
        for which, (_, weights) in made.items()
    ]


_HEADER = f"{'model':<13} {'side':<15} {'weights MB':>10} {'ms':>8} {'to autocast':>22} {'to half':>22}"


def _line(row: Row) -> str:
    spreads = f"{spread(row.to_autocast):>22} {spread(row.to_half):>22}"
    return f"{row.model:<13} {row.side:<15} {row.weights / 1e6:>10.1f} {row.ms:>8.1f} {spreads}"


def table(rows: Sequence[Row]) -> str:
    """Write the table to print: the rows, and geometric means of the ratios over the models."""
    lines = [_HEADER, *map(_line, rows), ""]
    for which in dict.fromkeys(row.side for row in rows):
        mine = [row for row in rows if row.side == which]
        autocast, half = (geometric_mean(getattr(row, kind)[1] for row in mine) for kind in ("to_autocast", "to_half"))
        lines.append(f"{which}: {autocast:.3f} of {AUTOCAST}'s time, {half:.3f} of {HALF}'s, geometric means")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    command = Command("inference", __doc__)
    command.names("--models", SMALL)
    command.rounds(ROUNDS)
    command.device()
    options = command.begin(arguments, is_timed=True)
    store = Store(options.json, Row, settings_of(options, "rounds", "dtype"))
    asked = options.device, DTYPES[options.dtype], options.rounds
    store.fill(options.models, "model", lambda name: measure(name, *asked))
    return verdict(table(store.rows))


if __name__ == "__main__":
    sys.exit(main())
