"""Time attention over few tokens on a CPU, forward and backward, by torch's operator and this package's.

    python -m benchmarks.short_attention [--tokens 50,128] [--json PATH]

A batch of 8 in bfloat16, with 4 heads of 64, on one thread; query, key and value are views, as in models. The sides
take turns, and each round starts with another; ratios are taken within a round: medians, with quartiles.

This package's side always recomputes, also beyond the number of tokens where its operator falls back to torch's. The
exit status is 1 if it takes longer than torch's below that number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from autocastfx.runtime.operators.short_attention import TOKENS, recomputed
from benchmarks.store import Store
from benchmarks.timing import keep_memory, milliseconds, ratios, turns

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

    def work(side: str) -> tuple[Tensor, ...]:
        result = sides[side](*(t.transpose(1, 2) for t in given), is_causal=is_causal)
        return torch.autograd.grad(result.transpose(1, 2).reshape(gradient.shape), given, gradient)

    found: dict[str, list[float]] = {name: [] for name in sides}
    for is_counted, name in turns(list(sides), rounds):
        taken = milliseconds(lambda name=name: work(name), "cpu")
        if is_counted:
            found[name].append(taken)
    ours, theirs = found[OURS], found[THEIRS]
    return Row(tokens, is_causal, round(median(theirs), 2), round(median(ours), 2), ratios(ours, theirs))


_HEADER = f"{'tokens':>6} {'causal':>6} {'torch ms':>9} {'autocastfx ms':>13} {'to torch':>20}"


def table(rows: Sequence[Row]) -> str:
    """Write the table to print."""
    return "\n".join([_HEADER, *map(_line, rows)])


def _line(row: Row) -> str:
    spread = f"{row.to_torch[1]:.2f} ({row.to_torch[0]:.2f} to {row.to_torch[2]:.2f})"
    causal = "yes" if row.is_causal else "no"
    return f"{row.tokens:>6} {causal:>6} {row.torch_ms:>9.2f} {row.ms:>13.2f} {spread:>20}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the numbers of tokens asked for."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_attention", description=summary)
    parser.add_argument("--tokens", default=",".join(map(str, LENGTHS)), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="two or more; default: %(default)s")
    parser.add_argument("--json", type=Path, help="the store of rows")
    options = parser.parse_args(arguments)
    try:
        lengths = [int(length) for length in options.tokens.split(",")]
    except ValueError:
        parser.error(f"--tokens: numbers separated by commas, not {options.tokens!r}")
    if min(lengths) < 1:
        parser.error("--tokens are at least 1")
    if options.rounds < 2:
        parser.error("--rounds: quartiles need two or more")

    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_memory()
    store = Store(options.json, Row, {"rounds": options.rounds})
    held = {(row.tokens, row.is_causal) for row in store.rows}
    for case in ((tokens, is_causal) for tokens in lengths for is_causal in (False, True)):
        if case not in held:
            store.extend([measure(*case, options.rounds)])
    print(table(store.rows))
    return int(any(row.to_torch[1] > 1 for row in store.rows if row.tokens <= TOKENS))


if __name__ == "__main__":
    sys.exit(main())
