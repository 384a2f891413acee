"""Time the passes of a conversion: by number of nodes, on graphs shaped like real models, or beside the capture.

    python -m benchmarks.conversion [--sizes 100,1000] [--shapes unet] [--json PATH]
    python -m benchmarks.conversion --zoo [--models bert,gpt2] [--all] [--json PATH]

All passes lead from the captured graph to compiled code, verification included. Times are CPU time. By size, each is
the median of three, and the exit status is 1 if placing a graph of 10,000 nodes takes more than 5 seconds, or all
passes more than 10. With ``--zoo`` each model of the zoo is captured in training and in evaluation mode, and converted:
both times are the smallest of three (slow captures run fewer times), and the exit status is 1 if the passes take more
than half of the capture's time. ``--all`` prints every row, not only the worst.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any, TypeVar
from unittest import mock

import torch
import transformers
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from autocastfx.capture.call import CallSignature
from autocastfx.capture.captured import Captured
from autocastfx.capture.shape_guard import ShapeGuard
from autocastfx.errors import AutocastFXError
from autocastfx.graph.node import set_value, tensors
from autocastfx.passes import pipeline
from autocastfx.passes.analysis.place_cheaply import place_cheaply
from autocastfx.passes.analysis.units import Ports, units_of
from autocastfx.passes.decide.checks import Classifier
from autocastfx.passes.pipeline import Converter
from autocastfx.passes.state import Pass, Settings, State
from autocastfx.plan.plan import Decision, Placement, Precision
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from autocastfx.runtime.amp_module import view
from autocastfx.runtime.captures import CapturedGraph, Captures
from autocastfx.runtime.variant import converted_variant
from benchmarks.command import Command, verdict
from benchmarks.store import Store
from benchmarks.zoo import FIRST_SIZE, MODELS, MODES, ZooModel

SIZES = (100, 300, 1000, 3000, 10000)
REPEATS = 3
LIMITS = {"place": 5.0, "passes": 10.0}  # seconds, for a graph of the last size
ENOUGH = 1.0  # seconds of captures, after which there is no further one
LIMIT = 0.5  # of the capture's time
SHOWN = 12  # rows in the zoo's table

LIST, FACTS = load_op_list("float16"), load_kernel_facts()
aten = torch.ops.aten
R = TypeVar("R")


@dataclass(frozen=True)
class Row:
    """Seconds of two passes and of all passes for a graph, and the number of its nodes that were placed in 16 bits."""

    shape: str
    nodes: int
    classify: float
    place: float
    passes: float
    low: int


@dataclass(frozen=True)
class ZooRow:
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


# ---- the times of passes --------------------------------------------------------------------------------------------


def seconds(work: Callable[[], R]) -> tuple[R, float]:
    """Run ``work``; return its result and its CPU time, which other processes affect less than wall time."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


def pass_times(converter: Converter, graph: CapturedGraph, held: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the seconds of each pass that converts and compiles ``graph``; the work around them counts as passes.

    Args:
        converter: the policy.
        graph: to convert, for the device that it was captured on; it is not changed.
        held: parameters and buffers by name.
    """
    taken: dict[str, float] = {}

    def timed(step: type[Pass]) -> Callable[[Settings], Callable[[State], State]]:
        def run(policy: Settings, state: State) -> State:
            made, spent = seconds(lambda: step(policy)(state))
            taken[step.name] = taken.get(step.name, 0.0) + spent
            return made

        return lambda policy: partial(run, policy)

    with (
        mock.patch.object(pipeline, "PIPELINE", tuple(map(timed, pipeline.PIPELINE))),
        mock.patch.object(pipeline, "FOLLOW_PIPELINE", tuple(map(timed, pipeline.FOLLOW_PIPELINE))),
    ):
        variant, spent = seconds(lambda: converted_variant(converter, graph, held, graph.captured.device))
    taken["copy and plan"] = spent - sum(taken.values())
    _, taken["compile"] = seconds(lambda: variant.mount("variant", CallSignature(())))  # which no call reads
    return taken


def placed(graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> Mapping[fx.Node, Placement]:
    """Compute the placement of each node from the decisions."""
    return place_cheaply(graph, decisions, units_of(graph, decisions, Ports(LIST, FACTS)))


def measure(shape: str, size: int) -> Row:
    """Time classifying, placing and the whole conversion of a graph of this shape and size."""
    graph = SHAPES[shape](size)
    read = (n for n in graph.nodes if n.op == "get_attr")
    parameters = {str(n.target): nn.Parameter(torch.empty(tensors(n)[0].shape, device="meta")) for n in read}
    captured, converter = _captured(graph), Converter(LIST, FACTS, torch.float16)
    classifier = Classifier(LIST, FACTS, torch.float16, "cuda")
    decisions = classifier(graph, {}).decisions
    found = placed(graph, decisions)
    return Row(
        shape,
        len(graph.nodes),
        _median(lambda: seconds(lambda: classifier(graph, {}))[1]),
        _median(lambda: seconds(lambda: placed(graph, decisions))[1]),
        _median(lambda: sum(pass_times(converter, captured, parameters).values())),
        sum(placement.run is Precision.LOW for placement in found.values()),
    )


def _captured(graph: fx.Graph) -> CapturedGraph:
    """Wrap ``graph`` as if it had been captured from a call without arguments."""
    call = CallSignature(()).bind((), {})
    captured = Captured(graph, {}, call.structure, ShapeGuard(), (True,), torch.device("cpu"))
    read = (str(node.target) for node in graph.find_nodes(op="get_attr"))
    return CapturedGraph(captured, tuple(dict.fromkeys(read)), {})


def _median(measured: Callable[[], float]) -> float:
    return statistics.median(measured() for _ in range(REPEATS))


def measure_model(model: ZooModel, mode: str) -> ZooRow | None:
    """Time capture and passes of ``model`` in ``mode``; None if it cannot be captured."""
    module = model.build().train(mode == "train")
    converter = Converter(load_op_list("bfloat16"), FACTS, torch.bfloat16)
    signature, inputs = CallSignature.of(module.forward), model.inputs(*FIRST_SIZE)

    def captured() -> CapturedGraph:
        return view(Captures(module, signature), converter, None, ())._probe((), inputs, converts=False)[0]

    try:
        found, spent = seconds(captured)
    except AutocastFXError:
        return None
    captures = [spent]
    while len(captures) < REPEATS and sum(captures) < ENOUGH:
        captures.append(seconds(captured)[1])
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    held = found.read(dict(named))
    best = min((pass_times(converter, found, held) for _ in range(REPEATS)), key=lambda taken: sum(taken.values()))
    slowest, total = max(best, key=lambda name: best[name]), sum(best.values())
    return ZooRow(
        model.name, mode, len(found.captured.graph.nodes), min(captures), total, slowest, best[slowest] / total
    )


def in_both_modes(name: str) -> list[ZooRow]:
    """Return the rows of a model, in the modes in which it can be captured."""
    return [row for mode in MODES if (row := measure_model(MODELS[name], mode)) is not None]


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Write the table of graphs."""
    head = f"{'shape':<10} {'nodes':>6} {'classify s':>10} {'place s':>10} {'all passes s':>12} {'low nodes':>10}"
    return "\n".join([head, *map(_line, rows)])


def _line(row: Row) -> str:
    times = f"{row.classify:>10.3f} {row.place:>10.3f} {row.passes:>12.3f}"
    return f"{row.shape:<10} {row.nodes:>6} {times} {row.low:>10}"


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


def too_slow(rows: Sequence[ZooRow]) -> list[ZooRow]:
    """Return the rows above the limit, the worst first."""
    return sorted((row for row in rows if row.ratio > LIMIT), key=lambda row: -row.ratio)


def zoo_table(rows: Sequence[ZooRow], shown: int = SHOWN) -> str:
    """Write the table of models: the rows with the highest ratios, and the total."""
    worst = sorted(rows, key=lambda row: -row.ratio)
    lines = [f"{'model':<22} {'mode':<5} {'nodes':>5} {'capture ms':>10} {'passes ms':>9} {'ratio':>5}  most"]
    lines += map(_zoo_line, worst[: max(shown, len(too_slow(rows)))])
    if rows:
        median = statistics.median(row.ratio for row in rows)
        lines += [
            "",
            f"{len(rows)} rows of {len({row.model for row in rows})} models: ratio {median:.2f} in the median, "
            f"{worst[0].ratio:.2f} at most; above {LIMIT:g}: {len(too_slow(rows))}",
        ]
    return "\n".join(lines)


def _zoo_line(row: ZooRow) -> str:
    return (
        f"{row.model:<22} {row.mode:<5} {row.nodes:>5} {1e3 * row.capture:>10.0f} {1e3 * row.passes:>9.0f} "
        f"{row.ratio:>5.2f}  {row.slowest} {100 * row.share:.0f} %"
    )


# ---- graphs of any size ----------------------------------------------------------------------------------------------

BATCH, TOKENS, WIDTH, HEADS = 8, 128, 256, 4


class _Builder:
    """A graph under construction; each call gives the size of its result."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    @property
    def size(self) -> int:
        return len(self.graph.nodes)

    def _valued(self, node: fx.Node, *sizes: Sequence[int], dtypes: Sequence[torch.dtype] = ()) -> fx.Node:
        with self.mode:
            made = [torch.empty(s, dtype=d) for s, d in zip(sizes, dtypes or [torch.float32] * len(sizes), strict=True)]
        set_value(node, made[0] if len(made) == 1 else tuple(made))
        return node

    def input(self, *size: int) -> fx.Node:
        return self._valued(self.graph.placeholder(f"x{self.size}"), size)

    def parameter(self, *size: int) -> fx.Node:
        return self._valued(self.graph.create_node("get_attr", f"p{self.size}"), size)

    def call(self, function: Any, size: Sequence[int], *args: Any) -> fx.Node:
        return self._valued(self.graph.call_function(function, args), size)

    def like(self, function: Any, x: fx.Node, *args: Any) -> fx.Node:
        """Add a call whose result has the size of its first argument."""
        return self.call(function, x.meta["val"].shape, x, *args)

    def linear(self, x: fx.Node, width: int) -> fx.Node:
        *leading, before = x.meta["val"].shape
        weight, bias = self.parameter(width, before), self.parameter(width)
        return self.call(aten.linear.default, (*leading, width), x, weight, bias)

    def norm(self, x: fx.Node) -> fx.Node:
        width = x.meta["val"].shape[-1]
        return self.like(aten.layer_norm.default, x, [width], self.parameter(width), self.parameter(width))

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.like(aten.add.Tensor, a, b)

    def done(self, *outputs: fx.Node) -> fx.Graph:
        self.graph.output(outputs)
        return self.graph


def residual(size: int) -> fx.Graph:
    """Build a deep chain: transformer blocks that add to one residual stream, which a norm reads in each block."""
    b = _Builder()
    x = b.input(BATCH, TOKENS, WIDTH)
    split, heads = (BATCH, TOKENS, HEADS, WIDTH // HEADS), (BATCH, HEADS, TOKENS, WIDTH // HEADS)
    while b.size < size - 1:
        normed, parts = b.norm(x), []
        for _ in range(3):
            part = b.call(aten.view.default, split, b.linear(normed, WIDTH), list(split))
            parts.append(b.call(aten.transpose.int, heads, part, 1, 2))
        mixed = b.call(aten.scaled_dot_product_attention.default, heads, *parts)
        mixed = b.call(aten.transpose.int, split, mixed, 1, 2)
        mixed = b.call(aten.reshape.default, (BATCH, TOKENS, WIDTH), mixed, [BATCH, TOKENS, WIDTH])
        x = b.add(x, b.like(aten.dropout.default, b.linear(mixed, WIDTH), 0.1, True))
        hidden = b.like(aten.gelu.default, b.linear(b.norm(x), 4 * WIDTH))
        x = b.add(x, b.like(aten.dropout.default, b.linear(hidden, WIDTH), 0.1, True))
    return b.done(b.norm(x))


def experts(size: int) -> fx.Graph:
    """Build a wide layer: a float32 router weighs experts side by side, and their results are added up."""
    b = _Builder()
    x = b.norm(b.input(BATCH * TOKENS, WIDTH))
    scores = b.like(aten.softmax.int, b.linear(x, 64), -1)
    total = b.like(aten.zeros_like.default, x)
    while b.size < size - 1:
        weight = b.call(aten.select.int, (BATCH * TOKENS,), scores, 1, 0)
        weight = b.call(aten.unsqueeze.default, (BATCH * TOKENS, 1), weight, -1)
        gate = b.like(aten.silu.default, b.linear(x, 2 * WIDTH))
        expert = b.linear(b.like(aten.mul.Tensor, gate, b.linear(x, 2 * WIDTH)), WIDTH)
        total = b.add(total, b.like(aten.mul.Tensor, expert, weight))
    return b.done(total)


def unet(size: int) -> fx.Graph:
    """Build two long arms: the way up reads the result of each step of the way down, in reverse order."""
    b = _Builder()
    channels, side = 32, 16

    def block(x: fx.Node) -> fx.Node:
        weight = b.parameter(channels, x.meta["val"].shape[1], 3, 3)
        x = b.call(aten.conv2d.default, (BATCH, channels, side, side), x, weight, None, [1, 1], [1, 1])
        x = b.like(aten.group_norm.default, x, 8, b.parameter(channels), b.parameter(channels))
        return b.like(aten.silu.default, x)

    x = b.input(BATCH, 4, side, side)
    skips = []
    while b.size < size // 2:
        x = block(x)
        skips.append(x)
    for skip in reversed(skips):
        x = block(b.call(aten.cat.default, (BATCH, 2 * channels, side, side), [x, skip], 1))
        if b.size >= size - 1:
            break
    return b.done(x)


def mixed(size: int) -> fx.Graph:
    """Build ops of every category on values drawn from a fixed seed, mostly recent ones."""
    b, draw = _Builder(), random.Random(0)
    values = [b.input(BATCH, TOKENS, WIDTH)]
    plain = (aten.relu.default, aten.gelu.default, aten.tanh.default, aten.exp.default, aten.clone.default)
    pairs = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)
    while b.size < size - 1:
        recent = values[-1 - min(int(draw.expovariate(0.5)), len(values) - 1)]
        kind = draw.random()
        if kind < 0.25:
            made = b.linear(recent, WIDTH)
        elif kind < 0.35:
            made = b.norm(recent)
        elif kind < 0.4:
            made = b.like(aten.softmax.int, recent, -1)
        elif kind < 0.7:
            made = b.like(draw.choice(plain), recent)
        else:
            made = b.like(draw.choice(pairs), recent, draw.choice(values))
        values.append(made)
    return b.done(values[-1])


SHAPES: dict[str, Callable[[int], fx.Graph]] = {"residual": residual, "experts": experts, "unet": unet, "mixed": mixed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the graphs, or the models, asked for."""
    command = Command("conversion", __doc__)
    command.numbers("--sizes", SIZES)
    command.names("--shapes", SHAPES)
    command.add_argument("--zoo", action="store_true", help="models of the zoo instead")
    command.names("--models", MODELS)
    command.add_argument("--all", action="store_true", help="print every row, not only the worst")
    options = command.begin(arguments)
    if not options.zoo:
        graphs = Store(options.json, Row, {"networkx": version("networkx")})
        graphs.rows.clear()  # they do not name the sizes asked for
        for shape, size in product(options.shapes, options.sizes):
            print(f"{shape} {size} ...", file=sys.stderr, flush=True)
            graphs.extend([measure(shape, size)])
        return verdict(table(graphs.rows), failures(graphs.rows))
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    store = Store(options.json, ZooRow, {"transformers": transformers.__version__, "dtype": "bfloat16"})
    measure_model(MODELS[options.models[0]], MODES[0])  # the work that torch does once in a process
    store.fill(options.models, "model", in_both_modes)
    print(zoo_table(store.rows, len(store.rows) if options.all else SHOWN))
    return int(bool(too_slow(store.rows)))


if __name__ == "__main__":
    sys.exit(main())
