"""Measure the cross entropy over a vocabulary, as ``benchmarks.vocabulary`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from benchmarks import vocabulary as benchmark
from benchmarks.gpu.sides import DTYPES
from benchmarks.gpu.stage import Given, Row


def vocabulary(given: Given, classes: Sequence[int], positions: int, rounds: int) -> Iterator[Row]:
    """Yield a row for each vocabulary, side and dtype."""
    torch.manual_seed(0)
    for name, dtype in DTYPES.items():
        for count in classes:
            if not given.has(f"{count} classes", benchmark.AUTOCAST, name):
                for row in benchmark.measure(count, positions, given.device, dtype, rounds):
                    yield {"model": f"{count} classes", "dtype": name, **asdict(row)}
