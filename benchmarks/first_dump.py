"""Time a first look at BERT-base as a newcomer has it: from `import` to the dump, in a terminal that shows progress.

    python -m benchmarks.first_dump [--limit 15]

A new process imports torch and autocastfx, makes the model of transformers with random weights (which is not counted),
converts it for training and evaluation, and dumps it. Its standard error is a terminal, whose lines of progress are
printed. The exit status is 1 above the limit of seconds, or if the terminal stays empty.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["main"]

SCRIPT = """
import time

started = time.perf_counter()
import torch

import autocastfx

imported = time.perf_counter()
from transformers import BertConfig, BertForMaskedLM

model = BertForMaskedLM(BertConfig(**{sizes}))
made = time.perf_counter()
ids = torch.zeros(2, 64, dtype=torch.int64)
inputs = {{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}}
amp_model = autocastfx.convert(model, inputs, dtype="bfloat16")
converted = time.perf_counter()
autocastfx.dump(amp_model)
done = time.perf_counter()
print(imported - started, made - imported, converted - made, done - converted)
"""


def measured(sizes: dict[str, int]) -> tuple[list[float], list[str]]:
    """Return seconds of the import, the model, the conversion and the dump, and the lines of progress."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(sizes=sizes)], stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # the terminal is closed: the process has ended
            break
        if not read:
            break
        seen += read
    os.close(ours)
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(seen.decode())
    return [float(word) for word in out.split()], re.findall(r"autocastfx: ([^\r]+?) …", seen.decode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure once, and compare with the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_dump", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit", type=float, default=15.0, help="seconds; default: %(default)s")
    parser.add_argument("--layers", type=int, default=12, help="of the model; default: %(default)s")
    options = parser.parse_args(arguments)
    (importing, making, converting, dumping), lines = measured({"num_hidden_layers": options.layers})
    total = importing + converting + dumping
    print("\n".join(f"shown: {line}" for line in lines))
    print(f"import {importing:.1f} s, convert {converting:.1f} s, dump {dumping:.1f} s; the model {making:.1f} s")
    held = total <= options.limit and bool(lines)
    print(f"{'reached' if held else 'MISSED '}  {total:.1f} s from import to dump; at most {options.limit:g}")
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
