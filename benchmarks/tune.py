"""How well errors are predicted, and what tuning by them gains over op lists, on models with real data.

    python -m benchmarks.tune [--models "GPT-2*"] [--dtypes bfloat16,float16] [--json PATH]

Each model is trained for 40 steps in float32 first. Sensitivity is measured on ten batches with 8 probes each, and
plans are chosen by it. Everything below is judged on eight batches that neither training nor tuning has seen; on 64 for
the digits CNN, because there gradients jump, and errors differ several times from one batch to another.

- ``nodes``: single nodes in 16 bits, with those that share their storage, all else in float32: how the predicted error
  ranks beside the true one (Spearman). Both are of the judged batches, on which a second sensitivity is measured for
  this alone.
- ``plans``: whole random plans: the least and the largest ratio of the predicted to the true error, both of the judged
  batches. ``unseen``: the same, predicted from the batches tuned on.
- by list: bytes moved and true error, over the default list's; the error alone for torch.autocast's, whose
  bytes are not counted.
- ``fewer``: ``tune(budget="default")``: bytes and error over the default's.
- ``float32``: of the bytes that the default list moves beyond the cheapest plan of the sweep, the share that this
  leaves.
- ``nearer``: ``tune(budget=Budget(bytes=1.0))``, the least error at no more bytes: the same.
- ``below``: the least error of a tuned plan at no more bytes than a list's, over the list's; the largest of the four
  lists. At most 1: the tuned front is on or below every list's point. For ``fold="kernel"``, ``tune(fold="kernel")``.

The verdict is ``gains`` for at least a quarter less error at no more bytes, or at most half of those bytes left at no
more error; ``float32`` where float32 itself moves no more bytes than the default list, which tuning then finds;
``nothing to gain`` where ``tune`` itself says so; else ``little``.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import transformers

import autocastfx
from autocastfx.numerics.plan_search import Budget, PlanSearch
from autocastfx.numerics.tune import prices_on, tune
from autocastfx.report.lint.roofline import find_gpu
from benchmarks.command import DTYPES, Command, verdict
from benchmarks.models.tuned import MODELS, available, trained
from benchmarks.store import Store
from benchmarks.tune_judge import Bench, Judged
from benchmarks.tune_table import DEFAULT, Row, table

MEASURED, HELD_OUT, JUDGED = 10, 2, 8
JUDGED_ON_MORE = {"digits CNN": 64}
LISTS = ("conservative", "torch_autocast_cuda")
KERNEL = "fold=kernel"
LEFT_OUT = {  # in float16
    **dict.fromkeys(("digits CNN", "ResNet-18", "MiniLM 6x384"), "its kernels take minutes on a CPU"),
    "Llama open": "it differs little from Llama 2x64",
}


def measure(name: str, dtype: str) -> Row:
    """Measure one model."""
    started = time.perf_counter()
    case = MODELS[name]
    model = trained(case)
    judged_on = JUDGED_ON_MORE.get(name, JUDGED)
    fresh = list(itertools.islice(case.batches(1), MEASURED + HELD_OUT + judged_on))
    first, judged = fresh[: MEASURED + HELD_OUT], fresh[MEASURED + HELD_OUT :]
    found = autocastfx.sensitivity(model, first[:MEASURED], case.loss, inputs=case.inputs, dtype=dtype, progress=False)
    bench = Bench(model, case, dtype, found, judged)
    default = bench.judge(bench.base)
    lists = {n: bench.judge(bench.converted(op_list=n)) for n in LISTS}
    lists[KERNEL] = bench.judge(bench.converted(fold="kernel"))
    given: dict[str, Any] = {"loss_fn": case.loss, "inputs": case.inputs, "dtype": dtype, "sensitivity": found}
    given |= {"held_out": HELD_OUT, "progress": False}
    tuned = [
        tune(model, first, budget="default", **given),
        tune(model, first, budget=Budget(bytes=1.0), **given),
        tune(model, first, budget=Budget(bytes=1.0), fold="kernel", **given),  # of the bytes of the list so folded
    ]
    fewer, nearer, kernel = map(bench.tuned, tuned)
    search = bench.search(found, prices_on(find_gpu("A100"), found))
    front = list(_front(bench, search))
    floor = min(point.bytes for point in tuned[0].front)
    left = (fewer.bytes - floor) / (default.bytes - floor) if _has_room(default.bytes, floor) else 1.0
    rank, count = bench.spearman()
    here, unseen = bench.ratios()
    share = _Share(default)
    (fewer_bytes, fewer_error), (nearer_bytes, nearer_error) = share(fewer), share(nearer)
    gains = nearer_error <= 0.75 and nearer_bytes <= 1.0
    gains |= left <= 0.5 and fewer_error <= 1.0
    nothing = not any(t.gains for t in tuned[:2])
    points = [fewer, nearer, *front]
    return Row(
        model=name,
        dtype=dtype,
        nodes=count,
        spearman=rank,
        plans=here,
        unseen=unseen,
        error=default.error,
        bytes=default.bytes,
        lists={n: share(point) for n, point in lists.items()},
        fewer_bytes=fewer_bytes,
        fewer_error=fewer_error,
        float32_left=left,
        nearer_bytes=nearer_bytes,
        nearer_error=nearer_error,
        kernel=share(kernel),
        front=sorted(map(share, front)),
        below={
            DEFAULT: _below(points, default, default),
            **{n: _below([*points, kernel] if n == KERNEL else points, at, default) for n, at in lists.items()},
        },
        verdict="gains" if gains else "nothing to gain" if nothing else "little",
        seconds=time.perf_counter() - started,
        notes=[f"{n}: {why}" for n, why in found.unmeasured.items()],
    )


class _Share:
    """Bytes and error over those of the default list."""

    def __init__(self, default: Judged) -> None:
        self.default = default

    def __call__(self, point: Judged) -> list[float]:
        return [point.bytes / self.default.bytes, point.error / self.default.error]


def _has_room(moved: int, floor: int) -> bool:
    """False if all is in 16 bits already."""
    return moved > 1.01 * floor


def _front(bench: Bench, search: PlanSearch) -> Iterator[Judged]:
    """Judge the distinct plans of a sweep of the price of an error."""
    search._at(0.0)
    for half in range(-4, 5):
        search._at(search.unit * 10.0 ** (half / 2))
    distinct = {one.key: one for one in search.cuts.values()}
    return (bench.said(search, search._said(one, 0.0)) for one in distinct.values())


def _below(points: Iterable[Judged], at: Judged, default: Judged) -> list[float]:
    """The least error at no more bytes over a list's, and the standard error of that ratio over the batches."""
    most = at.bytes or default.bytes  # of a list whose bytes are not counted: the default list's, which are fewer
    best = min((point for point in points if point.bytes <= most), key=lambda point: point.error, default=None)
    if best is None:
        return [math.inf, 0.0]
    return _ratio(best, at)


def _ratio(one: Judged, other: Judged) -> list[float]:
    """The error of one plan over another's, and the standard error of that ratio over the batches."""
    if not other.error:
        return [math.inf if one.error else 1.0, 0.0]
    ratios = [error / over for error, over in zip(one.errors, other.errors, strict=True)]
    return [one.error / other.error, statistics.stdev(ratios) / math.sqrt(len(ratios))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models chosen, and print the table."""
    command = Command("tune", __doc__)
    command.add_argument("--models", default="*", help="a glob of names")
    command.names("--dtypes", DTYPES)
    chosen = command.begin(arguments)
    warnings.simplefilter("ignore")
    asked: list[tuple[str, str]] = []
    for name, dtype in itertools.product(fnmatch.filter(MODELS, chosen.models), chosen.dtypes):
        why = LEFT_OUT.get(name) if dtype == "float16" else None
        if why := why if name in available() else "its weights are not installed":
            print(f"{name}, {dtype}: {why}, left out", file=sys.stderr)
        else:
            asked.append((name, dtype))
    store = Store(chosen.json, Row, {"transformers": transformers.__version__})
    store.fill(asked, "model dtype", lambda pair: [measure(*pair)])
    return verdict(table(store.rows))


if __name__ == "__main__":
    sys.exit(main())
