"""Estimate a training step on an H200 in float16, by side, for models at full size, on any machine.

    python -m benchmarks.cuda_plan [--models "GPT-2 b8 s1024"] [--json PATH]

Nothing is allocated or computed: forward and backward run on abstract tensors, and ``benchmarks.kernel_costs`` counts
the operators below autograd and estimates their time. It is an ESTIMATE, made alike for all sides; no time is measured.
Optimizer and loss scaling are left out. The sides are torch.autocast, this package with each level of ``fold``, two of
them with ``weights="cached"`` after an optimizer step too (one kernel then casts all weights, and few their gradients),
and a model that is float16 as a whole.

Operators and casts are those of a CUDA device (``benchmarks.cuda_dispatch``). Attention is cuDNN's where torch 2.13
takes it. With a dropout such as 0.1, or a mask that learns, it is flash attention without a mask, also where it is
causal, and memory-efficient attention with one. The bytes and operations of all three are counted alike. Masks that a
call brings hold padding, so that no side leaves them out. No row holds two sequences, so that decoders are causal
without a mask on all sides.

With ``--json`` each row is written at once; rows of the same commit are not estimated again. The exit status is 1 if a
goal is missed. The operators are then named that take the most time beyond torch.autocast's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean
from unittest import mock

import torch
from torch import Tensor
from transformers import masking_utils

import autocastfx
from benchmarks.command import Command
from benchmarks.cuda_dispatch import cuda_autocast, cuda_operators
from benchmarks.kernel_costs import BANDWIDTH, FLOOR, KernelCosts
from benchmarks.memory import make_fake
from benchmarks.models import MODELS, TRAINED, FullModel
from benchmarks.store import Store
from benchmarks.training import AUTOCAST, HALF

EXACT, KERNEL = "fold=exact", "fold=kernel"
EXACT_CACHED, KERNEL_CACHED = f"{EXACT} cached", f"{KERNEL} cached"
SIDES = (AUTOCAST, "fold=none", EXACT, EXACT_CACHED, KERNEL, KERNEL_CACHED, HALF)
# With scaled_dot_product_attention, where transformers has it.
FULL: dict[str, FullModel] = {
    **TRAINED,
    "BERT-base b8 s512": MODELS["BERT-base"],
    "GPT-2 b8 s1024": MODELS["GPT-2"],
}
# The most that a side may take of torch.autocast's time: on each model, and in the geometric mean.
EACH_LIMITS = {EXACT: 1.00, EXACT_CACHED: 1.00}
MEAN_LIMITS = {EXACT: 0.95, EXACT_CACHED: 0.95, KERNEL: 0.85, KERNEL_CACHED: 0.85}
_TOLD = 4  # operators of a missed goal


@dataclass(frozen=True)
class Row:
    """The estimate of a model's side: bytes, and milliseconds as a whole and by operator."""

    model: str
    side: str
    kernels: int
    casts: int
    cast_bytes: int
    moved_bytes: int
    saved_bytes: int
    ms: float
    ms_of: Mapping[str, float]


def estimate(name: str, model: FullModel, side: str) -> Row:
    """Estimate forward and backward of a side."""
    with torch.device("meta"):
        module, inputs = model.build().train(), model.inputs()
    if side == HALF:
        module.half()
        inputs = {key: held.half() if held.is_floating_point() else held for key, held in inputs.items()}
    with ExitStack() as stack:
        if side in (AUTOCAST, HALF):
            stack.enter_context(make_fake(module, inputs))
            stack.enter_context(_no_packed_sequences())
        else:
            fold, _, weights = side.removeprefix("fold=").partition(" ")
            options = {
                "dtype": torch.float16,
                "device": "cuda",
                "keep_output_dtype": False,
                "weights": weights or "cast",
            }
            module = autocastfx.convert(module, (), inputs, fold=fold, **options)  # type: ignore[arg-type]
        stack.enter_context(torch.device("meta"))
        stack.enter_context(cuda_operators())
        if side in (EXACT_CACHED, KERNEL_CACHED):
            module(**inputs)  # makes the copies, which the step makes stale
            torch.optim.SGD(module.parameters()).step()
        costs = stack.enter_context(KernelCosts(module, inputs.values()))
        with cuda_autocast(torch.float16) if side == AUTOCAST else ExitStack():
            loss = module(**inputs)[0]
        loss.backward()
    casts, saved = (costs.weights, costs.gradients, costs.activations), costs.saved()
    return Row(
        name,
        side,
        kernels=costs.kernels,
        casts=sum(cast.count for cast in casts),
        cast_bytes=sum(cast.bytes for cast in casts),
        moved_bytes=costs.bytes,
        saved_bytes=saved.activations + saved.weights,
        ms=1e3 * sum(costs.seconds.values()),
        ms_of={op: round(1e3 * seconds, 6) for op, seconds in costs.seconds.items()},
    )


def _no_packed_sequences() -> AbstractContextManager[object]:
    """Let transformers find that no row holds two sequences.

    It reads that from the positions, but not from abstract ones, and makes a mask for sequences that may be there.
    """
    search = masking_utils.find_packed_sequence_indices

    def found(position_ids: Tensor) -> None:
        search(position_ids)  # its kernels run in any case

    return mock.patch.object(masking_utils, search.__name__, found)


@dataclass(frozen=True)
class Goal:
    """A goal: a description with the figure, True if it is reached, and what to know where it is not."""

    text: str
    is_reached: bool
    details: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Write the goal, with its details if it is missed."""
        if self.is_reached:
            return [f"reached  {self.text}"]
        return [f"MISSED   {self.text}", *(f"         {detail}" for detail in self.details)]


def ratios(rows: Sequence[Row], side: str) -> dict[str, float]:
    """Return, by model, the time of ``side`` divided by torch.autocast's, if both were estimated."""
    ms = {(row.model, row.side): row.ms for row in rows}
    models = dict.fromkeys(row.model for row in rows)
    return {m: ms[m, side] / ms[m, AUTOCAST] for m in models if {(m, side), (m, AUTOCAST)} <= ms.keys()}


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals that ``rows`` allow to check."""
    found = []
    for side, limit in EACH_LIMITS.items():
        if of := ratios(rows, side):
            worst = max(of, key=lambda model: of[model])
            text = f"{side}: {of[worst]:.3f} times {AUTOCAST} on {worst}, the most of all models; at most {limit:.2f}"
            found.append(Goal(text, of[worst] <= limit, _told(rows, side, limit)))
    for side, limit in MEAN_LIMITS.items():
        if of := ratios(rows, side):
            mean = geometric_mean(of.values())
            text = f"{side}: {mean:.3f} times {AUTOCAST} in the geometric mean; at most {limit:.2f}"
            found.append(Goal(text, mean <= limit, _told(rows, side, limit)))
    return found


def _told(rows: Sequence[Row], side: str, limit: float) -> list[str]:
    """Write, for each model above ``limit``, the operators that take the most time beyond torch.autocast's."""
    above = {model: ratio for model, ratio in ratios(rows, side).items() if ratio > limit}
    return [f"{model}, {ratio:.3f}: {_more(rows, model, side)}" for model, ratio in above.items()]


def _more(rows: Sequence[Row], model: str, side: str) -> str:
    held = {row.side: row.ms_of for row in rows if row.model == model}
    ours, theirs = held[side], held[AUTOCAST]
    more = {op: ours.get(op, 0.0) - theirs.get(op, 0.0) for op in {**ours, **theirs}}
    most = sorted(more, key=lambda op: -more[op])[:_TOLD]
    return ", ".join(f"{op} {more[op]:+.3f} ms" for op in most if more[op] > 0)


_HEADER = (
    f"{'model':<22} {'side':<18} {'kernels':>7} {'casts':>5} {'cast GB':>8} {'moved GB':>8} {'saved GB':>8} "
    f"{'ms':>8} {'to autocast':>11}"
)


def _line(row: Row, ratio: float | None) -> str:
    sizes = " ".join(f"{found / 1e9:>8.2f}" for found in (row.cast_bytes, row.moved_bytes, row.saved_bytes))
    shown = "-" if ratio is None else f"{ratio:.3f}"
    return f"{row.model:<22} {row.side:<18} {row.kernels:>7} {row.casts:>5} {sizes} {row.ms:>8.3f} {shown:>11}"


def table(rows: Sequence[Row]) -> str:
    """Write the table to print: the rows, the geometric means and the goals."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"estimated: {BANDWIDTH / 1e12} TB/s, at least {FLOOR * 1e6:g} µs a kernel; nothing was measured"
    yield _HEADER
    of = {side: ratios(rows, side) for side in SIDES}
    for model in dict.fromkeys(row.model for row in rows):
        for side in SIDES:
            yield from (_line(row, of[side].get(model)) for row in rows if (row.model, row.side) == (model, side))
    yield ""
    for side, found in of.items():
        if found and side != AUTOCAST:
            yield f"{side}: {geometric_mean(found.values()):.3f} times {AUTOCAST} in the geometric mean"
    yield ""
    for goal in goals(rows):
        yield from goal.lines()


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate the models asked for."""
    command = Command("cuda_plan", __doc__)
    command.names("--models", FULL, separator=";")
    options = command.begin(arguments)
    store = Store(options.json, Row, {"dtype": "float16", "estimated for": "H200"})
    asked = product(options.models, SIDES)
    store.fill(asked, "model side", lambda pair: [estimate(pair[0], FULL[pair[0]], pair[1])])
    print(table(store.rows))
    return int(not all(goal.is_reached for goal in goals(store.rows)))


if __name__ == "__main__":
    sys.exit(main())
