"""Time placement, and all passes together, by number of nodes, on graphs shaped like real models.

    python -m benchmarks.conversion [--sizes 100,1000] [--shapes unet] [--json PATH]

All passes lead from the captured graph to compiled code, verification included. Each time is the median of three, in
CPU time. The exit status is 1 if placing a graph of 10,000 nodes takes more than 5 seconds, or all passes more than 10.
``python -m benchmarks.conversion_zoo`` compares real models' passes with their capture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature
from autocastfx.capture.export import Captured
from autocastfx.capture.shape_guard import ShapeGuard
from autocastfx.graph.node import tensors
from autocastfx.passes.analysis.place_cheaply import place_cheaply
from autocastfx.passes.analysis.units import Ports, units_of
from autocastfx.passes.classify import Classifier
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Decision, Placement, Precision
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from benchmarks.graphs import SHAPES
from benchmarks.machine import machine
from benchmarks.pass_times import pass_times, seconds

SIZES = (100, 300, 1000, 3000, 10000)
REPEATS = 3
LIMITS = {"place": 5.0, "passes": 10.0}  # seconds, for a graph of the last size

LIST, FACTS = load_op_list("float16"), load_kernel_facts()
CONVERTER = Converter(LIST, FACTS, torch.float16)


@dataclass(frozen=True)
class Row:
    """Seconds of two passes and of all passes for a graph, and the number of its nodes that were placed in 16 bits."""

    shape: str
    nodes: int
    classify: float
    place: float
    passes: float
    low: int


def placed(graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> Mapping[fx.Node, Placement]:
    """Compute the placement of each node from the decisions."""
    return place_cheaply(graph, decisions, units_of(graph, decisions, Ports(LIST, FACTS)))


def measure(shape: str, size: int) -> Row:
    """Time classifying, placing and the whole conversion of a graph of this shape and size."""
    graph = SHAPES[shape](size)
    parameters = {str(n.target): _parameter(n) for n in graph.nodes if n.op == "get_attr"}
    captured = _captured(graph)
    classifier = Classifier(LIST, FACTS, torch.float16, "cuda")
    decisions = classifier(graph, {}).decisions
    found = placed(graph, decisions)
    return Row(
        shape,
        len(graph.nodes),
        _median(lambda: seconds(lambda: classifier(graph, {}))[1]),
        _median(lambda: seconds(lambda: placed(graph, decisions))[1]),
        _median(lambda: pass_times(CONVERTER, captured, parameters).total),
        sum(placement.run is Precision.LOW for placement in found.values()),
    )


def _captured(graph: fx.Graph) -> Captured:
    """Wrap ``graph`` as if it had been captured from a call without arguments."""
    outputs = graph.output_node().args[0]
    call = CallSignature(()).bind((), {})
    spec = pytree.tree_structure(tuple(pytree.tree_leaves(outputs)))
    return Captured(graph, {}, spec, call.structure, ShapeGuard(), (True,), torch.device("cpu"))


def _parameter(node: fx.Node) -> nn.Parameter:
    """Make a parameter without contents, with the size of the value that ``node`` reads."""
    return nn.Parameter(torch.empty(tensors(node)[0].shape, device="meta"))


def _median(measured: Callable[[], float]) -> float:
    return statistics.median(measured() for _ in range(REPEATS))


_HEADER = f"{'shape':<10} {'nodes':>6} {'classify s':>10} {'place s':>10} {'all passes s':>12} {'low nodes':>10}"


def _line(row: Row) -> str:
    times = f"{row.classify:>10.3f} {row.place:>10.3f} {row.passes:>12.3f}"
    return f"{row.shape:<10} {row.nodes:>6} {times} {row.low:>10}"


def table(rows: Sequence[Row]) -> str:
    """Write the table to print."""
    return "\n".join([_HEADER, *map(_line, rows)])


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each time above its limit."""
    large = [row for row in rows if row.nodes >= SIZES[-1]]
    found = [(row, name, float(getattr(row, name)), limit) for row in large for name, limit in LIMITS.items()]
    words = {"place": "placed", "passes": "converted"}
    return [
        f"{row.shape}: {row.nodes} nodes {words[name]} in {taken:.1f} s, the limit is {limit:.0f} s"
        for row, name, taken, limit in found
        if taken > limit
    ]


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
    for failure in failures(rows):
        print(failure)
    if options.json:
        where = {**machine(), "networkx": version("networkx")}
        options.json.write_text(json.dumps({**where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return int(bool(failures(rows)))


if __name__ == "__main__":
    sys.exit(main())
