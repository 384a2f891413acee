"""Measure what is kept for backward, the gradient's error and the time of a step, by how values are kept.

    python -m benchmarks.memory --saved [--twins "GPT-2 eager"] [--rounds 6] [--json PATH]

The models are those of ``benchmarks.memory``, narrower, on the CPU in bfloat16, trained from random weights on random
numbers. "as computed" is the default; "recompute", "low" and "float8" keep all values alike; "chosen" is what ``tune``
chooses value by value for at most 1.5 times the default's error. Kept bytes are the storages that autograd holds after
forward with loss, each once, parameters and inputs apart. The peak is the most bytes that forward and backward allocate
at one time, by the allocator's events. The error is the relative distance of the gradient from float32's, on a batch
that nothing was measured on. Times are CPU times of forward and backward, in turns, and are shown as ratios to the
default's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import autocastfx
from autocastfx import AmpModule
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.saved_choice import SavedSearch
from benchmarks import timing
from benchmarks.models.families import FullModel
from benchmarks.models.small import CLASSES, SMALL, small_images
from benchmarks.step_counts import count

DEFAULT, CHOSEN = "as computed", "chosen"
SIDES = (DEFAULT, "recompute", "low", "float8", CHOSEN)
RATIO = 1.5  # of the chosen values' error to the default's
LESS, PREDICTED = 0.65, 1.5  # limits: of the bytes to the default's, of the measured error to the predicted one
WANTED = 5  # models


def _convnext() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 4, 2], "num_labels": CLASSES}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes))


TWINS: dict[str, FullModel] = {
    **{name: SMALL[name] for name in ("ResNet-50 112", "ViT 4x192")},
    "ConvNeXt 32": FullModel(_convnext, lambda: small_images(112)),
    **{name: SMALL[name] for name in ("BERT eager", "GPT-2 eager", "T5 2+2x256", "Llama 4x256")},
}


@dataclass(frozen=True)
class SavedRow:
    """One way to keep values of one model.

    Attributes:
        model, side: the model, and how its values are kept.
        kept: bytes held for backward, counted.
        peak: bytes that forward and backward allocate at one time.
        error: of the gradient.
        predicted: the same, predicted; None where it is not.
        time: quartiles of the ratio of a step's time to the default's.
    """

    model: str
    side: str
    kept: int
    peak: int
    error: float
    predicted: float | None
    time: list[float]


def measure(name: str, full: FullModel, rounds: int, peak: Callable[..., int]) -> list[SavedRow]:
    """Measure all sides of a model."""
    model = full.build().train()
    batches = [_drawn(full.inputs(), seed) for seed in range(3)]
    low = torch.bfloat16
    judge = TargetDistance(model, batches[2:], _first, "gradient", None)
    converted: dict[str, AmpModule] = {}
    for side in SIDES[:-1]:
        converted[side] = autocastfx.convert(model, (), batches[0], dtype=low, saved=side, check=False)
    search = SavedSearch(converted[DEFAULT], batches[:2], _first, None, judge, low)
    choice = search.result(ratio=RATIO)
    converted[CHOSEN] = autocastfx.convert(model, (), batches[0], dtype=low, saved=choice.entries, check=False)
    step = {side: partial(_step, amp_model, batches[2]) for side, amp_model in converted.items()}
    times = timing.timed(step, rounds)
    rows: list[SavedRow] = []
    for side, amp_model in converted.items():
        kept = count(amp_model, batches[2].values(), lambda amp_model=amp_model: amp_model(**batches[2])).saved()
        predicted = choice.predicted if side == CHOSEN else None
        rows.append(
            SavedRow(
                *(name, side, kept.activations, peak(step[side], step[side]), judge(amp_model, low), predicted),
                timing.ratios(times[side], times[DEFAULT]),
            )
        )
    return rows


def _drawn(inputs: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Inputs of the same sizes with other numbers."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator)
        most = int(x.max()) + 1
        return x if "mask" in name else torch.randint(most, x.shape, generator=generator)

    return {name: drawn(name, x) for name, x in inputs.items()}


def _first(output: Any, batch: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def _step(amp_model: AmpModule, batch: dict[str, Tensor]) -> None:
    _first(amp_model(**batch), batch).backward()
    amp_model.zero_grad()


def table(rows: Sequence[SavedRow]) -> str:
    """Write the table to print."""
    lines = [
        f"{'model':<16}{'kept':<13}{'MB':>9}{'of it':>7}{'peak':>7}"
        f"{'error':>10}{'of it':>7}{'predicted':>11}{'time':>20}"
    ]
    default = {row.model: row for row in rows if row.side == DEFAULT}
    for row in rows:
        base = default[row.model]
        predicted = "" if row.predicted is None else f"{row.predicted:.2e}"
        sizes = f"{row.kept / 1e6:>9.2f}{row.kept / base.kept:>7.2f}{row.peak / base.peak:>7.2f}"
        errors = f"{row.error:>10.2e}{row.error / base.error:>7.2f}{predicted:>11}"
        lines.append(f"{row.model:<16}{row.side:<13}{sizes}{errors}{timing.spread(row.time):>20}")
    good = [row for row in rows if row.side == CHOSEN and _is_good(row, default[row.model])]
    lines.append(
        f"{CHOSEN}: at most {LESS} of the bytes at {RATIO} of the error, predicted within {PREDICTED}, on {len(good)} "
        f"of {len(default)} models"
    )
    return "\n".join(lines)


def _is_good(row: SavedRow, base: SavedRow) -> bool:
    predicted = row.predicted or 0.0
    is_predicted = predicted and 1 / PREDICTED <= row.error / predicted <= PREDICTED
    return row.kept <= LESS * base.kept and row.error <= RATIO * base.error and bool(is_predicted)


def failures(rows: Sequence[SavedRow]) -> list[str]:
    """A line if too few models keep the limits."""
    default = {row.model: row for row in rows if row.side == DEFAULT}
    good = sum(_is_good(row, default[row.model]) for row in rows if row.side == CHOSEN)
    least = WANTED if len(default) == len(TWINS) else 0
    return [f"{CHOSEN}: {good} models keep the limits, {least} were wanted"] if good < least else []
