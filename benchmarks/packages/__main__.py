"""Run models of packages from the registry, converted by each way, in bfloat16 and float16 on the CPU.

    python -m benchmarks.packages [NAME ...] [--dtypes bfloat16] [--ways convert,enable] [--json PATH]

The names are those of the modules in ``benchmarks/packages/cases``. Each package runs in a process of its own, with a
limit of time for each row. Ways, each with three steps of SGD, and a loss scale in float16:

- ``convert``, ``enable``: outputs and gradients beside float32's and torch.autocast's.
- ``train``: enabled, and trained by the package's own trainer; how training changes each parameter.
- ``checkpointed convert``, ``checkpointed enable``: with the package's activation checkpointing.
- ``check``: what ``autocastfx.check`` finds on two batches.

Verdicts:

- ``ok``: right, and nothing was said. ``warned``: right, and this package gave a warning. ``refused``: an error of this
  package.
- ``silent``: outputs or gradients, each as one vector, are farther from float32's than 1.2 times torch.autocast's and
  two epsilons, for the median of five draws of the inputs; or the gradient of one parameter, in all steps of these
  draws, is farther than ten times and eight epsilons; or nothing runs in 16 bits without a word; or ``check`` finds a
  difference. Where torch.autocast fails, or gives Inf or NaN, it is taken to be two epsilons away.
- ``foreign``: an error of another program; or as ``silent``, in bfloat16, where torch.autocast gives Inf or NaN, which
  only a faulty kernel of torch's does in a range as wide as float32's. ``not run``: float32 itself does not run here.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.packages.judge import WAYS
from benchmarks.packages.processes import rows_of
from benchmarks.packages.row import FAULTS, Row
from benchmarks.packages.table import table
from benchmarks.store import Store

CASES = "benchmarks.packages.cases"
DTYPES = ("bfloat16", "float16")


def names() -> list[str]:
    """Return the names of the modules with cases."""
    return sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[!_]*.py"))


def main(arguments: Sequence[str] | None = None, cases: str = CASES) -> int:
    """Run the command; the exit code is 1 if a row is a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules of benchmarks/packages/cases; default: all")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, help="the store of rows: those of the same commit stay")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    store = Store(given.json, Row, {})
    for name in given.names or names():
        known = {(row.case, row.dtype, row.way) for row in store.rows if row.package == name}
        for row in rows_of(f"{cases}.{name}", given.ways.split(","), given.dtypes.split(","), known):
            store.extend([row])
            print(f"{row.package:<28} {row.case:<32} {row.dtype:<9} {row.way:<21} {row.verdict}", file=sys.stderr)
    print(table(store.rows))
    counts = Counter(row.verdict for row in store.rows)
    return int(any(counts[fault] for fault in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
