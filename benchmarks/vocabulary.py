"""Measure time and memory of the cross entropy of 16-bit logits over a vocabulary, with its gradient.

    python -m benchmarks.vocabulary [--classes 32000,50257] [--positions 1024] [--json PATH]
    python -m benchmarks.vocabulary --device cuda --dtype float16 --positions 8192 --json PATH

Each side computes the gradient of the same logits: ``torch.autocast`` widens them; ``autocastfx`` computes as a
converted model by default, or with ``fold="kernel"``, which differs for few logits; ``pure half`` computes a 16-bit
loss. The sides take turns, and each round starts with another; a side's ratio is its time divided by the other's in the
same round: medians, with quartiles. CPU times are those of the one thread.

``kept`` counts bytes that forward leaves allocated for backward, ``peak`` the most bytes allocated at one time, with
the gradient. Neither includes the logits. On a CPU the live results of operators are added up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss
from benchmarks.command import DTYPES, Command, settings_of, verdict
from benchmarks.store import Store
from benchmarks.timing import ratios, spread, timed

AUTOCAST, DEFAULT, KERNEL, HALF = "torch.autocast", "autocastfx", 'autocastfx, fold="kernel"', "pure half"
CLASSES = (4_096, 32_000, 50_257, 128_256)  # a small one, and those of Llama 2, GPT-2 and Llama 3
POSITIONS, ROUNDS = 1024, 12
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """A side for a vocabulary: milliseconds, quartiles of the ratios over rounds, and bytes."""

    classes: int
    positions: int
    side: str
    ms: float
    to_autocast: Sequence[float]
    kept: int
    peak: int


def losses(device: str, dtype: torch.dtype) -> dict[str, Loss]:
    """Return, by side, the loss as a function of logits and targets."""

    def under_autocast(logits: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device, dtype):
            return functional.cross_entropy(logits, target)

    return {
        AUTOCAST: under_autocast,
        DEFAULT: cross_entropy_loss,
        KERNEL: lambda logits, target: cross_entropy_loss(logits, target, rounds=True),
        HALF: functional.cross_entropy,
    }


class Allocations(TorchDispatchMode):
    """Adds up the storages that operators make while it is entered.

    Attributes:
        peak: the most bytes alive at one time.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in pytree.tree_leaves(result) if isinstance(t, Tensor)):
            if storage._cdata not in self._given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.present())
        return result

    def present(self) -> int:
        """Return the bytes alive now."""
        self._made = {key: (held, size) for key, (held, size) in self._made.items() if not held.expired()}
        return sum(size for _, size in self._made.values())


def allocated(loss: Loss, logits: Tensor, target: Tensor) -> tuple[int, int]:
    """Return the bytes kept after forward, and the most bytes allocated at one time until the gradient exists."""
    if logits.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = loss(logits, target)
        kept = torch.cuda.memory_allocated() - before
        torch.autograd.grad(found, logits)
        return kept, torch.cuda.max_memory_allocated() - before
    with Allocations((logits, target)) as allocations:
        found = loss(logits, target)
        kept = allocations.present()
        torch.autograd.grad(found, logits)
    return kept, allocations.peak


def measure(classes: int, positions: int, device: str, dtype: torch.dtype, rounds: int) -> list[Row]:
    """Return a row for each side."""
    logits = torch.randn(positions, classes, device=device).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (positions,), device=device)
    sides = losses(device, dtype)
    work = {name: lambda loss=loss: torch.autograd.grad(loss(logits, target), logits) for name, loss in sides.items()}
    found = timed(work, rounds, device)
    rows: list[Row] = []
    for name, loss in sides.items():
        quartiles = ratios(found[name], found[AUTOCAST])
        memory = allocated(loss, logits, target)
        rows.append(Row(classes, positions, name, round(median(found[name]), 2), quartiles, *memory))
    return rows


_HEADER = f"{'classes':>7} {'side':<25} {'ms':>8} {'to autocast':>20} {'kept MB':>8} {'peak MB':>8} {'to autocast':>11}"


def table(rows: Sequence[Row]) -> str:
    """Write the table to print."""
    peaks = {row.classes: row.peak for row in rows if row.side == AUTOCAST}
    return "\n".join([_HEADER, *(_line(row, peaks[row.classes]) for row in rows)])


def _line(row: Row, peak: int) -> str:
    memory = f"{row.kept / 1e6:>8.1f} {row.peak / 1e6:>8.1f} {row.peak / peak:>11.2f}"
    return f"{row.classes:>7} {row.side:<25} {row.ms:>8.2f} {spread(row.to_autocast):>20} {memory}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the vocabularies asked for."""
    command = Command("vocabulary", __doc__)
    command.numbers("--classes", CLASSES)
    command.number("--positions", POSITIONS)
    command.rounds(ROUNDS)
    command.device()
    options = command.begin(arguments, is_timed=True)
    torch.manual_seed(0)
    store = Store(options.json, Row, settings_of(options, "rounds", "dtype", "positions"))
    asked = options.positions, options.device, DTYPES[options.dtype], options.rounds
    store.fill(options.classes, "classes", lambda classes: measure(classes, *asked))
    return verdict(table(store.rows))


if __name__ == "__main__":
    sys.exit(main())
