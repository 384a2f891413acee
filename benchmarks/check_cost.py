"""Measure what the check by default adds to a conversion: of ResNet-50, BERT-base and GPT-2, on the CPU.

    python -m benchmarks.check_cost [--models GPT-2] [--rounds 3]

Each model is converted without the check and with it, in turns, in one process; a first conversion is not counted. The
share is the median of the rounds' own. `memory` is the largest resident size of a process that converts once, with the
check and without, divided by the bytes of the parameters. The exit status is 1 if a check is more than a third of its
conversion, or if it takes more than 1.3 times the memory.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence

import torch
import transformers

import autocastfx
from benchmarks.command import Command
from benchmarks.models.full import MODELS

NAMES = ("ResNet-50", "BERT-base", "GPT-2")
LIMIT, MOST_MEMORY = 1 / 2, 1.3  # to a conversion without the check
ROWS, LENGTH = 8, 128


def converted(name: str, *, check: bool | None) -> float:
    """Convert a model; return the seconds that it took."""
    torch.manual_seed(0)
    model = MODELS[name].build()
    given = {name: _drawn(held[:ROWS]) for name, held in MODELS[name].inputs().items()}
    started = time.perf_counter()
    autocastfx.convert(model, example_kwargs=given, dtype=torch.bfloat16, check=check)
    return time.perf_counter() - started


def _drawn(held: torch.Tensor) -> torch.Tensor:
    """Return numbers of the same sizes, of sequences only the first part."""
    if held.is_floating_point():
        return torch.randn(held.shape)
    return held[:, :LENGTH].contiguous() if held.ndim == 2 else held


def peak(name: str, *, check: bool | None) -> int:
    """Return the most bytes of a process that converts a model once."""
    code = f"from benchmarks.check_cost import one; one({name!r}, {check})"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(found.stdout.split()[-1])


def one(name: str, check: bool | None) -> None:
    """Convert a model, and print the most bytes that the process has held."""
    _quiet()
    converted(name, check=check)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for, and print a row each."""
    command = Command("check_cost", __doc__, stores=False)
    command.names("--models", NAMES)
    command.number("--rounds", 3)
    options = command.begin(arguments)
    _quiet()
    is_dear = False
    print(f"{'model':<10} {'without s':>9} {'with s':>7} {'added':>6} {'memory: without':>16} {'with':>5}")
    for name in options.models:
        converted(name, check=None)
        pairs = [(converted(name, check=False), converted(name, check=None)) for _ in range(options.rounds)]
        without, checked = (statistics.median(pair[i] for pair in pairs) for i in range(2))
        added = statistics.median(b / a for a, b in pairs) - 1
        size = sum(p.nbytes for p in MODELS[name].build().parameters())
        memory = [peak(name, check=check) / size for check in (False, None)]
        print(
            f"{name:<10} {without:>9.1f} {checked:>7.1f} {added:>6.0%} {memory[0]:>16.1f} {memory[1]:>5.1f}", flush=True
        )
        is_dear |= added > LIMIT or memory[1] > MOST_MEMORY * memory[0]
    return int(is_dear)


if __name__ == "__main__":
    sys.exit(main())
