"""Measure on a GPU parity, speed and memory, most valuable first, in two calls that a short loan has time for.

    python -m benchmarks.gpu --out DIR --call 1 --minutes 7.9
    python -m benchmarks.gpu --out DIR --call 2 --minutes 3.9 --resume DIR
    python -m benchmarks.gpu --out DIR --call 1 --device cpu --tiny

The sides take turns in each round, after three steps to warm up, and a side's ratio is to torch.autocast's time in the
same round: medians, with quartiles. A training step is forward, backward and fused AdamW, with the copies of cached
weights that the next step reads. It is timed in three ways: ``step`` by CUDA events, the device idle before it, which
counts what the host takes to begin; ``back to back`` as a share of several steps that do not wait for the device, as
in training; ``kernels`` by the profiler, the sum of its kernels without gaps. Tokens (with padding) or images a second,
and MFU, the share of the card's peak in 16 bits that the model's products reach, are of steps back to back; what is
computed twice does not count.

In float16 torch.autocast has a ``GradScaler``, the other sides a ``LossScalingOptimizer``; ``pure half`` has float32
masters in both dtypes. ``Apex O2-like`` is pure half as Apex's O2 has it, of torch alone: batch norms stay float32, and
fused AdamW and ``GradScaler`` update float32 masters, between copies of all gradients and of all weights. ``float32``
switches TF32 off, ``TF32`` on. Liger is under torch.autocast. Peak memory is that of one side alone.

The first call shows that all works, and measures training steps beside torch.autocast. The second one runs again what
failed or was not reached in the first, then other ways to train, compiled models beside eager ones, kernel facts and
the other tests. Without ``--call`` all is run. Rows are appended at once to DIR/rows.jsonl; DIR/log.txt has what stages
printed. ``--resume`` leaves out what its rows hold of the same card. ``--only NAME`` runs some stages alone. ``--tiny``
runs the same stages on small models, as a test of this command itself. The table is printed last;
``python -m benchmarks.gpu.table DIR`` prints it again. See CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import rows, table
from benchmarks.gpu.plan import CALLS, plan
from benchmarks.gpu.runner import Settings, run
from benchmarks.gpu.stage import Row
from benchmarks.machine import moment, processor

SHOWN = 9000  # characters of the table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the calls asked for. Return 0 even if stages failed: their rows say so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of rows.jsonl and log.txt")
    parser.add_argument("--resume", type=Path, help="a folder of earlier rows; may be that of --out")
    parser.add_argument("--minutes", type=float, default=20, help="for all; default: %(default)s")
    parser.add_argument("--call", type=int, choices=tuple(CALLS), help="default: both")
    only = "only stages whose names begin so; may be given more than once. Without --resume they are measured again"
    parser.add_argument("--only", action="append", metavar="NAME", help=only)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models and few rounds")
    parser.add_argument("--ahead", type=int, help="stages that prepare beside the next one; default: 3, on a CPU 0")
    parser.add_argument("--together", type=int, help="stages that work side by side; default: 8, on a CPU 2")
    parser.add_argument("--commit", default="", help="the commit to note where this is no checkout")
    options = parser.parse_args(arguments)
    out, is_cuda = options.out, options.device == "cuda"
    if options.minutes < 0:
        parser.error("--minutes: 0 or more")
    if options.resume is not None and not options.resume.is_dir():
        parser.error(f"--resume: there is no folder {options.resume}")
    earlier: list[Row] = []
    measures_again = options.only and options.resume is None
    for folder in dict.fromkeys((options.resume, out)):
        earlier += rows.read(folder) if folder is not None and not measures_again else []
    if options.resume is None and earlier:
        parser.error(f"{out} holds rows: go on with --resume {out}, or name another folder")
    card = _card() if is_cuda else f"CPU: {processor()}"
    if not card:
        parser.error("--device cuda: torch sees no CUDA device; --device cpu --tiny tests the command without one")
    number = options.call or max(CALLS)
    was_called = any(row.get("call") == 1 and row.get("card") == card for row in earlier)
    calls = [number] if number == 1 or (options.call and not was_called) else list(CALLS)
    stages = plan(calls, options.device, is_tiny=options.tiny)
    for name in options.only or ():
        if not any(stage.name.startswith(name) for stage in stages):
            parser.error(f"--only {name}: no stage begins so; there are: {'; '.join(stage.name for stage in stages)}")
    if options.only:
        stages = [stage for stage in stages if stage.always or stage.name.startswith(tuple(options.only))]
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        **{"call": number, "out": out, "device": options.device, "card": card, "earlier": earlier},
        ends=time.monotonic() + 60 * options.minutes,
        ahead=options.ahead if options.ahead is not None else (3 if is_cuda else 0),
        together=options.together if options.together is not None else (8 if is_cuda else 2),
        commit=options.commit or moment()["commit"],
    )
    try:
        run(stages, settings)
    except KeyboardInterrupt:
        print(f"stopped; go on with --resume {out}", file=sys.stderr)
        return 130
    print(table.short([*earlier, *rows.read(out)], card, SHOWN))
    return 0


def _card() -> str:
    """Return the name of the CUDA device; empty if there is none. Importing torch here would cost the loan seconds."""
    try:
        asked = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main())
