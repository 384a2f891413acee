"""Compare the time of all passes of a conversion with the capture's, for each model of the zoo.

    python -m benchmarks.conversion_zoo [--models bert,gpt2] [--json PATH]

Each model is captured in training and in evaluation mode, and the captured graph is converted: recomposed, decided,
placed, rewritten, verified, compiled. Both times are the smallest of three, in CPU time; slow captures run fewer times.
The exit status is 1 if the passes take more than half of the capture's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from autocastfx.capture.call import CallSignature
from autocastfx.capture.export import Captured, capture
from autocastfx.dtypes import dtype_name
from autocastfx.errors import AutocastFXError
from autocastfx.passes.pipeline import Converter
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from benchmarks.hand import HAND
from benchmarks.pass_times import pass_times, seconds
from benchmarks.store import Store
from benchmarks.zoo import FIRST_SIZE, ZooModel
from benchmarks.zoo_models import ZOO

DTYPE = torch.bfloat16
MODES = ("train", "eval")
REPEATS = 3
ENOUGH = 1.0  # seconds of captures, after which there is no further one
LIMIT = 0.5  # of the capture's time
SHOWN = 12  # rows in the table

CONVERTER = Converter(load_op_list(dtype_name(DTYPE)), load_kernel_facts(), DTYPE)


@dataclass(frozen=True)
class Row:
    """Seconds of a model's capture in one mode, and of all its passes; and the slowest pass."""

    model: str
    mode: str
    nodes: int
    capture: float
    passes: float
    slowest: str
    share: float  # of all passes' time

    @property
    def ratio(self) -> float:
        """The passes' time divided by the capture's."""
        return self.passes / self.capture


def measure(model: ZooModel, mode: str) -> Row | None:
    """Time capture and passes of ``model`` in ``mode``; None if it cannot be captured."""
    module = model.build().train(mode == "train")
    signature = CallSignature.of(module.forward)
    call = signature.bind((), model.inputs(*FIRST_SIZE))
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    held = dict[str, torch.Tensor](named)
    modes = tuple(m.training for m in module.modules())

    def captured() -> Captured:
        return capture(module, signature, call, training=modes, held=held)

    try:
        found, spent = seconds(captured)
    except AutocastFXError:
        return None
    captures = [spent]
    while len(captures) < REPEATS and sum(captures) < ENOUGH:
        captures.append(seconds(captured)[1])
    best = min((pass_times(CONVERTER, found, held) for _ in range(REPEATS)), key=lambda times: times.total)
    share = best.by_pass[best.slowest] / best.total
    return Row(model.name, mode, len(found.graph.nodes), min(captures), best.total, best.slowest, share)


def measure_all(models: Sequence[ZooModel]) -> Iterator[list[Row]]:
    """Yield the rows of each model, in the modes in which it can be captured.

    A first capture, not counted, does the work that torch does once in a process.
    """
    for model in models[:1]:
        measure(model, MODES[0])
    for model in models:
        print(f"{model.name} ...", file=sys.stderr, flush=True)
        yield [row for mode in MODES if (row := measure(model, mode)) is not None]


_HEADER = f"{'model':<22} {'mode':<5} {'nodes':>5} {'capture ms':>10} {'passes ms':>9} {'ratio':>5}  most"


def _line(row: Row) -> str:
    return (
        f"{row.model:<22} {row.mode:<5} {row.nodes:>5} {1e3 * row.capture:>10.0f} {1e3 * row.passes:>9.0f} "
        f"{row.ratio:>5.2f}  {row.slowest} {100 * row.share:.0f} %"
    )


def failures(rows: Sequence[Row]) -> list[Row]:
    """Return the rows above the limit, the worst first."""
    return sorted((row for row in rows if row.ratio > LIMIT), key=lambda row: -row.ratio)


def table(rows: Sequence[Row], shown: int = SHOWN) -> str:
    """Write the table to print: the rows with the highest ratios, and the total."""
    worst = sorted(rows, key=lambda row: -row.ratio)
    lines = [_HEADER, *map(_line, worst[: max(shown, len(failures(rows)))])]
    if rows:
        median = statistics.median(row.ratio for row in rows)
        lines += [
            "",
            f"{len(rows)} rows of {len({row.model for row in rows})} models: ratio {median:.2f} in the median, "
            f"{worst[0].ratio:.2f} at most; above {LIMIT:g}: {len(failures(rows))}",
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    by_name = {model.name: model for model in (*ZOO, *HAND)}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conversion_zoo", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", default=",".join(by_name), help="separated by commas; all by default")
    parser.add_argument("--all", action="store_true", help="print every row, not only the worst")
    parser.add_argument("--json", type=Path, help="the store of rows")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"unknown: {', '.join(unknown)}; models: {', '.join(by_name)}")

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    store = Store(options.json, Row, {"transformers": transformers.__version__, "dtype": dtype_name(DTYPE)})
    held = {row.model for row in store.rows}
    for rows in measure_all([by_name[name] for name in names if name not in held]):
        store.extend(rows)
    print(table(store.rows, len(store.rows) if options.all else SHOWN))
    return int(bool(failures(store.rows)))


if __name__ == "__main__":
    sys.exit(main())
