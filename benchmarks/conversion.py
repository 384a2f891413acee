"""How long placement takes by number of nodes, on graphs shaped like real models.

    python -m benchmarks.conversion [--sizes 100,1000] [--shapes unet] [--json PATH]

Each time is the median of three. The exit status is 1 where a graph of 10,000 nodes takes more than 5 seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import fx

from autocastfx.kernel_facts import load_kernel_facts
from autocastfx.op_list import load_op_list
from autocastfx.passes.classify import Classifier
from autocastfx.passes.place import place
from autocastfx.plan import Decision, Placement, Precision
from autocastfx.ports import Ports
from autocastfx.unit import units_of
from benchmarks.graphs import SHAPES

SIZES = (100, 300, 1000, 3000, 10000)
REPEATS = 3
LIMIT = 5.0  # seconds, for a graph of the last size

LIST, FACTS = load_op_list("float16"), load_kernel_facts()


@dataclass(frozen=True)
class Row:
    """Seconds that one graph took, and how many of its nodes were placed in 16 bits."""

    shape: str
    nodes: int
    classify: float
    place: float
    low: int


def placed(graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> Mapping[fx.Node, Placement]:
    """What is measured: from decisions to a placement for each node."""
    return place(graph, decisions, units_of(graph, decisions, Ports(LIST, FACTS)))


def measure(shape: str, size: int) -> Row:
    """Classify and place the graph of that shape and size."""
    graph = SHAPES[shape](size)
    classifier = Classifier(LIST, FACTS, torch.float16, "cuda")
    decisions = classifier(graph, {}).decisions
    found = placed(graph, decisions)
    return Row(
        shape,
        len(graph.nodes),
        _median(lambda: classifier(graph, {})),
        _median(lambda: placed(graph, decisions)),
        sum(placement.run is Precision.LOW for placement in found.values()),
    )


def _median(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


_HEADER = f"{'shape':<10} {'nodes':>6} {'classify s':>10} {'place s':>10} {'low nodes':>10}"


def _line(row: Row) -> str:
    return f"{row.shape:<10} {row.nodes:>6} {row.classify:>10.3f} {row.place:>10.3f} {row.low:>10}"


def table(rows: Sequence[Row]) -> str:
    """What is printed."""
    return "\n".join([_HEADER, *map(_line, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the graphs asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of nodes, separated by commas")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="separated by commas")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    shapes, sizes = options.shapes.split(","), [int(size) for size in options.sizes.split(",")]
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        parser.error(f"unknown: {', '.join(unknown)}; shapes: {', '.join(SHAPES)}")

    torch.set_num_threads(1)
    rows = []
    print(_HEADER)
    for shape in shapes:
        for size in sizes:
            print(f"{shape} {size} ...", file=sys.stderr, flush=True)
            row = measure(shape, size)
            rows.append(row)
            print(_line(row), flush=True)
    slow = [row for row in rows if row.nodes >= SIZES[-1] and row.place > LIMIT]
    for row in slow:
        print(f"{row.shape}: {row.nodes} nodes placed in {row.place:.1f} s, the limit is {LIMIT:.0f} s")
    if options.json:
        versions = {name: version(name) for name in ("torch", "networkx")} | {"python": sys.version.split()[0]}
        options.json.write_text(json.dumps({**versions, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
