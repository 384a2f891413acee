"""Measure on a GPU parity, kernel facts, speed and memory, most valuable first.

    python -m benchmarks.gpu --out DIR [--call A] [--minutes 9.5] [--resume DIR]
    python -m benchmarks.gpu --out DIR --device cpu --tiny

A call is a list of stages for about nine minutes on a large GPU. A: ceilings, parity, kernel facts, tests. B: training
steps in float16. C: steps in bfloat16, memory, optimizer, losses. D: steps in CUDA graphs and under torch.compile.
Without ``--call`` all are run. Rows are appended at once to DIR/rows.jsonl; DIR/log.txt has what failed stages printed.
``--resume`` leaves out stages that are done there, and rows that are there. ``--tiny`` runs the same stages on small
models, as a test of this command itself. ``python -m benchmarks.gpu.table DIR`` shows the rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import rows
from benchmarks.gpu.plan import CALLS, plan
from benchmarks.gpu.runner import Settings, run
from benchmarks.gpu.stage import Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the calls asked for. Return 0 even if stages failed: their rows say so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of rows.jsonl and log.txt")
    parser.add_argument("--resume", type=Path, help="a folder of earlier rows; may be that of --out")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all calls together; default: %(default)s")
    parser.add_argument("--call", choices=tuple(CALLS), help="default: all, in this order")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models and few rounds")
    parser.add_argument("--ahead", type=int, help="stages that prepare while one measures; default: 2, on a CPU 0")
    parser.add_argument("--commit", default="", help="the commit to note where this is no checkout")
    options = parser.parse_args(arguments)
    if options.minutes < 0:
        parser.error("--minutes: 0 or more")
    out: Path = options.out
    earlier: list[Row] = []
    try:
        for folder in dict.fromkeys((options.resume, out)):
            earlier += rows.read(folder) if folder is not None else []
    except ValueError as error:
        parser.error(str(error))
    if options.resume is None and earlier:
        parser.error(f"{out} holds rows: go on with --resume {out}, or name another folder")
    if options.resume is not None and not options.resume.is_dir():
        parser.error(f"--resume: there is no folder {options.resume}")
    if options.device == "cuda" and not _sees_cuda():
        parser.error("--device cuda: torch sees no CUDA device; --device cpu --tiny tests the command without one")
    out.mkdir(parents=True, exist_ok=True)
    ahead = options.ahead if options.ahead is not None else (2 if options.device == "cuda" else 0)
    ends = time.monotonic() + 60 * options.minutes
    for call in [options.call] if options.call else CALLS:
        settings = Settings(call, out, options.device, ends, earlier, ahead, options.commit)
        run(plan(call, options.device, is_tiny=options.tiny), settings)
    return 0


def _sees_cuda() -> bool:
    import torch  # the command itself needs it for nothing else

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
