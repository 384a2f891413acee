"""Time attention over few tokens on a CPU, forward and backward, by torch's operator and this package's.

    python -m benchmarks.short_attention [--tokens 50,128] [--json PATH]

A batch of 8 in bfloat16, with 4 heads of 64, on one thread; query, key and value are views, as in models. The sides
take turns, and each round starts with another; ratios are taken within a round: medians, with quartiles.

This package's side always recomputes, also beyond the number of tokens where its operator falls back to torch's. The
exit status is 1 if it takes longer than torch's below that number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from autocastfx.runtime.operators.short_attention import TOKENS, recomputed
from benchmarks.command import Command, settings_of
from benchmarks.store import Store
from benchmarks.timing import ratios, spread, timed

BATCH, HEADS, SIZE = 8, 4, 64
LENGTHS = (16, 50, 96, 128, TOKENS, 192, 224, 256)
ROUNDS = 15
OURS, THEIRS = "autocastfx", "torch"


@dataclass(frozen=True)
class Row:
    """A number of tokens, with milliseconds, and quartiles of the ratios over rounds."""

    tokens: int
    is_causal: bool
    torch_ms: float
    ms: float
    to_torch: Sequence[float]


def measure(tokens: int, is_causal: bool, rounds: int) -> Row:
    """Measure a row."""
    given = [torch.randn(BATCH, tokens, HEADS, SIZE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    gradient = torch.randn(BATCH, tokens, HEADS * SIZE, dtype=torch.bfloat16)
    sides = {OURS: recomputed, THEIRS: functional.scaled_dot_product_attention}

    def work(attention: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            result = attention(*(t.transpose(1, 2) for t in given), is_causal=is_causal)
            return torch.autograd.grad(result.transpose(1, 2).reshape(gradient.shape), given, gradient)

        return run

    found = timed({name: work(attention) for name, attention in sides.items()}, rounds)
    ours, theirs = found[OURS], found[THEIRS]
    return Row(tokens, is_causal, round(median(theirs), 2), round(median(ours), 2), ratios(ours, theirs))


_HEADER = f"{'tokens':>6} {'causal':>6} {'torch ms':>9} {'autocastfx ms':>13} {'to torch':>20}"


def table(rows: Sequence[Row]) -> str:
    """Write the table to print."""
    return "\n".join([_HEADER, *map(_line, rows)])


def _line(row: Row) -> str:
    causal = "yes" if row.is_causal else "no"
    return f"{row.tokens:>6} {causal:>6} {row.torch_ms:>9.2f} {row.ms:>13.2f} {spread(row.to_torch):>20}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the numbers of tokens asked for."""
    command = Command("short_attention", __doc__)
    command.numbers("--tokens", LENGTHS)
    command.rounds(ROUNDS)
    options = command.begin(arguments, is_timed=True)
    torch.manual_seed(0)
    store = Store(options.json, Row, settings_of(options, "rounds"))
    asked = product(options.tokens, (False, True))
    store.fill(asked, "tokens is_causal", lambda case: [measure(*case, options.rounds)])
    print(table(store.rows))
    return int(any(row.to_torch[1] > 1 for row in store.rows if row.tokens <= TOKENS))


if __name__ == "__main__":
    sys.exit(main())
