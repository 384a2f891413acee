"""How many architectures run right, converted by each way: a training step and an evaluation, beside torch.autocast.

    python -m benchmarks.reach [--cases 'llama*'] [--kind transformers,hand] [--ways convert,backend] [--json PATH]

Small models of transformers (:mod:`benchmarks.models.architectures`), the hand-written hard cases of the zoo, and those
that no single graph can hold (:mod:`benchmarks.models.hand.dynamic`), in bfloat16 on the CPU. Each case runs in a
process of its own, for two minutes at most. Verdicts:

- ``right``: outputs and gradients, each as one vector, are at most twice as far from float32's as torch.autocast's are,
  and an epsilon of the dtype. Where torch.autocast fails, it is taken to be two epsilons away.
- ``partly``: right, but some code runs under torch.autocast or in float32, and was told.
- ``apart``: farther, for the median of five inputs, because choices among experts flip.
- ``silent``: evaluation runs more matrix products in float32 than torch.autocast's and than the plans tell of, and
  nothing was said; or results are float32's to the bit, though torch.autocast's are not. Operators of libraries and
  custom autograd functions, which dumps count as unlisted, may run any number.
- ``refused``: an error of this package. ``failed``: another error, or the time was up.

What float32 itself does not run is left out.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.errors import AutocastFXError
from benchmarks.command import Command
from benchmarks.judge import ASSUMED_EPS, distance
from benchmarks.models.architectures import small_models
from benchmarks.models.hand import HAND, dynamic
from benchmarks.models.zoo import ZooModel
from benchmarks.store import Store

LOW = torch.bfloat16
BATCH = 2
SIZES = (12, 13, 9, 16, 20)  # the first; the others where that is too far
SECONDS = 120
PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm")
PRODUCT_OPS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")  # a plan's
WAYS = ("convert", "backend")
GOOD = ("right", "partly")
RESULTS = Path(__file__).resolve().parent / "results"
# What a path on this machine begins with.
_PLACE = re.compile(rf"\S*/site-packages/|{re.escape(str(Path(__file__).resolve().parents[1]))}/")


@dataclass(frozen=True)
class Row:
    """A case, converted by one way.

    Attributes:
        kind: ``"transformers"`` or ``"hand"``.
        ours: the largest distance from float32: of the outputs and of the gradients, each as one vector.
        autocast: torch.autocast's, for the same vector.
        graphs: how many were converted.
        reason: why it is not right.
    """

    case: str
    kind: str
    way: str
    verdict: str
    ours: float
    autocast: float
    graphs: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class _Ran:
    """Results of a training step and of an evaluation, each as one vector.

    Attributes:
        products: matrix products in float32 of a call in training and of the evaluation.
    """

    outputs: Tensor
    gradients: Tensor
    products: int


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    found = [t.detach().double().flatten() for t in tensors if t is not None]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def _floating(tree: Any) -> list[Tensor]:
    if hasattr(tree, "to_tuple"):
        tree = tree.to_tuple()
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _ran(model: nn.Module, called: Callable[..., Any], case: ZooModel, size: int) -> _Ran:
    """Train a step, without the optimizer's, and evaluate."""
    model.zero_grad()
    model.train()
    torch.manual_seed(0)
    outputs = _floating(called(**case.inputs(BATCH, size)))
    roots = [output.float().mean() for output in outputs if output.requires_grad]
    if roots:
        torch.stack(roots).sum().backward()
    gradients = _flat(p.grad for p in model.parameters())
    products, _ = _products(called, case, size)
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        more, evaluated = _products(called, case, size)
    return _Ran(_flat([*outputs, *_floating(evaluated)]), gradients, products + more)


def _products(called: Callable[..., Any], case: ZooModel, size: int) -> tuple[int, Any]:
    """Call the model, and count matrix products in float32; also return its outputs."""
    for _ in range(2):  # code that reads what the first call has changed is captured anew
        called(**case.inputs(BATCH, size))
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as events:
        outputs = called(**case.inputs(BATCH, size))
    found: Any = events.profiler.kineto_results.events()
    return sum(event.name() in PRODUCTS and event.dtypes()[0] == "float" for event in found), outputs


def _apart(found: _Ran, exact: _Ran) -> tuple[float, float]:
    return distance(found.outputs, exact.outputs), distance(found.gradients, exact.gradients)


@dataclass(frozen=True)
class _Found:
    """The larger of two distances from float32, of the outputs and of the gradients, and torch.autocast's of the same.

    Attributes:
        is_silent: True if more ran in float32 than the plans tell of.
        told: what does not run in 16 bits as the lists say.
    """

    ours: float
    autocast: float
    is_silent: bool
    graphs: int
    told: tuple[str, ...] = ()

    @property
    def is_near(self) -> bool:
        return self.ours <= 2 * self.autocast + torch.finfo(LOW).eps

    @property
    def ratio(self) -> float:
        return self.ours / (2 * self.autocast + torch.finfo(LOW).eps)


class _NoReference(Exception):
    """float32 does not run the case, or gives no finite result."""


def measure(case: ZooModel, kind: str, way: str) -> Row | None:
    """Judge a case, converted by ``way``; None if float32 does not run it."""
    start = time.perf_counter()

    def row(verdict: str, reason: str = "", found: _Found | None = None) -> Row:
        ours, autocast, graphs = (found.ours, found.autocast, found.graphs) if found is not None else (0.0, 0.0, 0)
        seconds = time.perf_counter() - start
        return Row(case.name, kind, way, verdict, ours, autocast, graphs, seconds, _PLACE.sub("", reason))

    try:
        found = _judged(case, way, SIZES[0])
        if not found.is_near:
            others = [found, *(_judged(case, way, size) for size in SIZES[1:])]
            found = sorted(others, key=lambda one: one.ratio)[len(others) // 2]
    except _NoReference:
        return None
    except AutocastFXError as error:
        return row("refused", _said(error))
    except Exception as error:
        return row("failed", f"{type(error).__name__}: {_said(error)}")
    if not found.is_near:
        return row("apart", f"{found.ours:.1e}, torch.autocast {found.autocast:.1e}", found)
    if found.is_silent and not found.told:
        return row("silent", found=found)
    return row("partly" if found.told else "right", "; ".join(found.told), found)


def _judged(case: ZooModel, way: str, size: int) -> _Found:
    try:
        model = case.build()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        exact = _ran(model, model, case, size)
    except Exception as error:
        raise _NoReference from error
    if not (exact.outputs.isfinite().all() and exact.outputs.numel()):
        raise _NoReference
    model.load_state_dict(state)
    usual, products = (ASSUMED_EPS * torch.finfo(LOW).eps,) * 2, exact.products
    try:
        with torch.autocast("cpu", LOW):
            theirs = _ran(model, model, case, size)
        usual, products = _apart(theirs, exact), theirs.products
    except Exception:
        pass  # the assumed distance stands
    model = case.build()
    told: list[str] = []
    if way == "backend":
        backend = autocastfx.CompileBackend(dtype=LOW, inner="eager")
        found = _ran(model, backend.compile(model), case, size)
        if backend.skipped:  # what was skipped runs otherwise from the next call on
            model.load_state_dict(state)
            found = _ran(model, model, case, size)
        plans = [graph.plan for graph in backend.graphs if graph.plan is not None]
        graphs = len(backend.graphs)
        told = [*map(str, backend.skipped), *(graph.failure for graph in backend.graphs if graph.failure)]
    else:
        amp_model = autocastfx.convert(model.train(), (), case.inputs(BATCH, size), dtype=LOW)
        found, graphs = _ran(amp_model, amp_model, case, size), len(amp_model.variants)
        plans = [_plan_in(amp_model, training, case, size) for training in (True, False)]
    runs = [(node.op, str(node.placement.run)) for plan in plans for node in plan.nodes]
    planned = sum(op in PRODUCT_OPS and run != "low" for op, run in runs)
    distances = _apart(found, exact)
    if any("::" in op or "." in op for op, _ in runs):
        planned = found.products
    is_silent = found.products > max(planned, products) or max(distances) == 0 < max(usual)
    pairs = [_Found(*pair, is_silent, graphs, tuple(told)) for pair in zip(distances, usual, strict=True)]
    return max(pairs, key=lambda one: one.ratio)


def _plan_in(amp_model: autocastfx.AmpModule, training: bool, case: ZooModel, size: int) -> autocastfx.Plan:
    """Return the plan of the graph that a call in this mode runs: one graph may serve both."""
    with torch.no_grad():
        amp_model.train(training)(**case.inputs(BATCH, size))
    return amp_model.plan


def _said(error: BaseException) -> str:
    return " ".join(_PLACE.sub("", str(error)).split())[:300]


def _in_process(case: ZooModel, kind: str, way: str) -> Row | None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        warnings.simplefilter("ignore")
        with redirect_stdout(StringIO()):  # of models that print
            found = measure(case, kind, way)
        theirs.send(found)

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(SECONDS) else "the time was up"
    except EOFError:
        found = "the process ended"
    process.kill()
    process.join()
    return Row(case.name, kind, way, "failed", 0.0, 0.0, 0, SECONDS, found) if isinstance(found, str) else found


def table(rows: Sequence[Row]) -> str:
    """Count the verdicts by kind and way, then list what is not right, with its reason."""
    lines = [
        f"{'cases':<14} {'way':<8} {'cases':>5} {'right':>5} {'partly':>6} {'right, all graphs':>17} {'either':>7}"
    ]
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind]
        by_any = len({row.case for row in mine if row.verdict in GOOD}) / len({row.case for row in mine})
        for way in dict.fromkeys(row.way for row in mine):
            counts = Counter(row.verdict for row in mine if row.way == way)
            lines.append(
                f"{kind:<14} {way:<8} {counts.total():>5} {counts['right']:>5} {counts['partly']:>6} "
                f"{counts['right'] / counts.total():>17.1%} {by_any:>7.1%}"
            )
    others = [row for row in rows if row.verdict != "right"]
    lines += ["", *(f"{row.case:<24} {row.way:<8} {row.verdict:<8} {row.reason[:150]}" for row in others)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a case is apart or silent."""
    command = Command("reach", __doc__)
    command.add_argument("--cases", default="*", help="patterns of names, separated by commas")
    command.names("--kind", ("transformers", "hand"))
    command.names("--ways", WAYS)
    given = command.begin(arguments)
    cases = [("transformers", case) for case in small_models()] + [("hand", case) for case in (*HAND, *dynamic.CASES)]
    patterns = given.cases.split(",")
    chosen = [(k, c) for k, c in cases if k in given.kind and any(fnmatch.fnmatch(c.name, p) for p in patterns)]
    store = Store(given.json, Row, {"transformers": version("transformers")})
    known = {(row.case, row.kind, row.way) for row in store.rows}
    for kind, case in chosen:
        for way in (way for way in given.ways if (case.name, kind, way) not in known):
            row = _in_process(case, kind, way)
            if row is None:
                break
            store.extend([row])
            said = f"{row.case:<24} {row.way:<8} {row.verdict:<8} {row.seconds:5.1f} s  {row.reason[:100]}"
            print(said, file=sys.stderr)
    print(table(store.rows))
    return int(any(row.verdict in ("apart", "silent") for row in store.rows))


if __name__ == "__main__":
    sys.exit(main())
