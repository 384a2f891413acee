"""How well errors are predicted, and what tuning by them gains over op lists, on models with real data.

    python -m benchmarks.tune [--models "GPT-2*"] [--dtypes bfloat16,float16] [--json PATH]

Each model is trained for 40 steps in float32 first. Sensitivity is measured on three batches with 8 probes each;
everything below is judged on batches that neither training nor the measurement has seen.

- ``nodes``: single nodes in 16 bits, all else in float32: how the predicted error ranks beside the true one (Spearman).
- ``plans``: whole random plans: the least and the largest ratio of the predicted to the true error.
- ``cost``: time of the measurement in gradient evaluations per batch, and its peak memory over a float32 training
  step's with AdamW, parameters included in both.
- by list: bytes moved and true error, over the default list's; the error alone for torch.autocast's, whose
  bytes are not counted.
- ``fewer``: ``tune(budget="default")``: bytes and error over the default's.
- ``float32``: of the bytes that the default list moves beyond the cheapest plan of the sweep, the share that this
  leaves.
- ``nearer``: ``tune(budget=Budget(bytes=1.0))``, the least error at no more bytes: the same.

The verdict is ``gains`` for at least a quarter less error at no more bytes, or at most half of those bytes left at no
more error; ``nothing to gain`` where ``tune`` itself says so; else ``little``.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

import autocastfx
from autocastfx import Budget, Forced, PlanError, Precision, Sensitivity
from autocastfx.conversion import convert_captured
from autocastfx.numerics.sensitivity import Measuring, loss_of
from autocastfx.numerics.target_error import TargetError
from autocastfx.numerics.tune import tune
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Plan, PlannedNode
from autocastfx.plan.prices import Prices
from autocastfx.plan.read_plan import read_plan
from autocastfx.policy.op_list import load_op_list
from benchmarks.store import Store
from benchmarks.tune_models import MODELS, Case, trained

__all__ = ["Row", "main", "measure", "table"]

MEASURED, HELD_OUT, NODES, PLANS = 3, 2, 24, 8
LISTS = ("conservative", "torch_autocast_cuda")
_MOVES = (Precision.LOW, Precision.FLOAT32)
_FREE = ("allow", "deny", "infer")


@dataclass(frozen=True)
class Row:
    """The results of one model in one dtype. Bytes and errors of lists are shares of the default list's."""

    model: str
    dtype: str
    nodes: int
    spearman: float
    plans: list[float]
    evaluations: float
    memory: float
    error: float
    bytes: int
    lists: dict[str, list[float]]
    fewer_bytes: float
    fewer_error: float
    float32_left: float
    nearer_bytes: float
    nearer_error: float
    verdict: str
    seconds: float
    notes: list[str] = field(default_factory=list[str])


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with what is above or below its mark."""
    head = (
        f"{'model':12}{'dtype':>10}{'nodes':>7}{'plans':>12}{'cost':>11}{'default':>9}{'kernel':>12}"
        f"{'conservative':>14}{'autocast':>12}{'fewer':>13}{'float32':>9}{'nearer':>13}  verdict"
    )
    lines = [head]
    for r in rows:
        pairs = {name: f"{b:.2f} {e:.2f}" if b else f"{e:.2f}" for name, (b, e) in r.lists.items()}
        lines.append(
            f"{r.model:12}{r.dtype:>10}{r.spearman:>7.2f}{f'{min(r.plans):.2f}-{max(r.plans):.2f}':>12}"
            f"{f'{r.evaluations:.0f} {r.memory:.1f}x':>11}{r.error:>9.1e}{pairs['fold=kernel']:>12}"
            f"{pairs['conservative']:>14}{pairs['torch_autocast_cuda']:>12}"
            f"{f'{r.fewer_bytes:.2f} {r.fewer_error:.2f}':>13}{r.float32_left:>9.2f}"
            f"{f'{r.nearer_bytes:.2f} {r.nearer_error:.2f}':>13}  {r.verdict}"
        )
    ranks = sum(r.spearman >= 0.85 for r in rows)
    ratios = sum(min(r.plans) >= 0.7 and max(r.plans) <= 1.5 for r in rows)
    costs = sum(r.evaluations <= 50 and r.memory <= 3 for r in rows)
    gains = {r.model for r in rows if r.verdict == "gains"}
    lines += [
        "",
        f"Spearman at least 0.85: {ranks} of {len(rows)}. Plans predicted within 0.7 to 1.5: {ratios} of {len(rows)}. "
        f"At most 50 gradient evaluations and 3 x the memory: {costs} of {len(rows)}.",
        f"Gains on {len(gains)} of {len({r.model for r in rows})} models: {', '.join(sorted(gains)) or 'none'}.",
    ]
    return "\n".join(lines)


def measure(name: str, dtype: str) -> Row:
    """Measure one model."""
    started = time.perf_counter()
    case = MODELS[name]
    model = trained(case)
    fresh = list(itertools.islice(case.batches(1), MEASURED + 2 * HELD_OUT))
    first, judged = fresh[: MEASURED + HELD_OUT], fresh[MEASURED + HELD_OUT :]
    options: dict[str, Any] = {"loss_fn": case.loss, "inputs": case.inputs}
    found, evaluations, memory = _measured(model, case, first[:MEASURED], dtype)
    judge = TargetError(model, judged, case.loss, "gradient", case.inputs)
    bench = _Bench(model, case, dtype, found, judge, fresh[0])
    default = bench.converted()
    error, moved = bench.error(default), default.plan.traffic.moved
    lists = {n: bench.share(bench.converted(op_list=n), error, moved) for n in LISTS}
    lists["fold=kernel"] = bench.share(bench.converted(fold="kernel"), error, moved)
    given = {**options, "dtype": dtype, "sensitivity": found, "held_out": HELD_OUT, "progress": False}
    fewer = tune(model, first, budget="default", **given)
    nearer = tune(model, first, budget=Budget(bytes=1.0), **given)
    floor = min(p.bytes for p in fewer.front)
    results = [bench.share(bench.tuned(t.op_list), error, moved) for t in (fewer, nearer)]
    (fewer_bytes, fewer_error), (nearer_bytes, nearer_error) = results
    left = (fewer.point.bytes - floor) / (moved - floor) if moved > 1.01 * floor else 1.0  # else all is low already
    rank, count = bench.spearman()
    gains = nearer_error <= 0.75 and nearer_bytes <= 1.0
    gains |= left <= 0.5 and fewer_error <= 1.0
    nothing = not (fewer.gains or nearer.gains)
    return Row(
        model=name,
        dtype=dtype,
        nodes=count,
        spearman=rank,
        plans=bench.ratios(),
        evaluations=evaluations,
        memory=memory,
        error=error,
        bytes=moved,
        lists=lists,
        fewer_bytes=fewer_bytes,
        fewer_error=fewer_error,
        float32_left=left,
        nearer_bytes=nearer_bytes,
        nearer_error=nearer_error,
        verdict="gains" if gains else "nothing to gain" if nothing else "little",
        seconds=time.perf_counter() - started,
        notes=[f"{n}: {why}" for n, why in found.unmeasured.items()],
    )


def _measured(model: nn.Module, case: Case, batches: Sequence[Any], dtype: str) -> tuple[Sensitivity, float, float]:
    """Measure sensitivity, its time in gradient evaluations a batch, and its peak memory over a step's."""
    amp_model = autocastfx.convert(model, *_inputs(case, batches[0]), dtype=dtype)
    measuring = Measuring(amp_model, case.loss, "gradient", 8, case.inputs)
    measuring.add(batches[0])  # captures what is to be captured
    one = min(_timed(lambda: _gradients(model, case, batches[0])) for _ in range(5))
    measuring.found = None
    each = [_timed(lambda batch=batch: measuring.add(batch)) for batch in batches]
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    again = Measuring(amp_model, case.loss, "gradient", 8, case.inputs)
    peak = _peak(lambda: again.add(batches[0]))

    def step() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.0)
        loss_of(case.call(model, batches[0]), batches[0], case.loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    buffers = [(b, b.clone()) for b in model.buffers()]
    of_step = _peak(step)
    for buffer, before in buffers:
        buffer.data.copy_(before)
    assert measuring.found is not None
    return measuring.found, statistics.median(each) / one, (held + peak) / (held + of_step)


def _inputs(case: Case, batch: Any) -> tuple[Any, Any]:
    given = batch if case.inputs is None else case.inputs(batch)
    return ((), given) if isinstance(given, dict) else ((given,), None)


def _gradients(model: nn.Module, case: Case, batch: Any) -> None:
    loss = loss_of(case.call(model, batch), batch, case.loss)
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _timed(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak(work: Any) -> int:
    """The most bytes allocated at a time by ``work``, beyond what was before."""
    with profile(profile_memory=True) as recorded:
        work()
    events: Iterable[Any] = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


@dataclass
class _Bench:
    """The judge of plans of one model."""

    model: nn.Module
    case: Case
    dtype: str
    found: Sensitivity
    judge: TargetError
    example: Any

    def __post_init__(self) -> None:
        self.base = self.converted()
        self.converter: Converter = replace(self.base._maker.converter, prices=Prices(self.found))  # type: ignore[union-attr]
        names = {effect.name for effect in self.found.effects}
        self.open = [n for n in self.base.plan.nodes if n.name in names and _is_open(n)]

    def converted(self, **options: Any) -> autocastfx.AmpModule:
        return autocastfx.convert(self.model, *_inputs(self.case, self.example), dtype=self.dtype, **options)

    def tuned(self, op_list: autocastfx.OpList) -> autocastfx.AmpModule:
        return self._by(replace(self.converter, op_list=op_list))

    def error(self, amp_model: nn.Module) -> float:
        return self.judge(amp_model, getattr(torch, self.dtype))

    def share(self, amp_model: autocastfx.AmpModule, error: float, moved: int) -> list[float]:
        return [amp_model.plan.traffic.moved / moved, self.error(amp_model) / error]

    def _by(self, converter: Converter) -> autocastfx.AmpModule:
        again = convert_captured(self.base, converter)
        assert again is not None
        return again

    def with_low(self, low: Iterable[str]) -> autocastfx.AmpModule | None:
        """Convert with these nodes in 16 bits, and all others that may be chosen in float32."""
        chosen, may = set(low), {n.name for n in self.base.plan.nodes if n.placement.run in _MOVES}
        nodes = (_placed(n, n.name in chosen) if n.name in may else n for n in self.base.plan.nodes)
        plan: Plan = replace(self.base.plan, nodes=tuple(nodes))
        try:
            return self._by(replace(self.converter, plan=read_plan(plan), op_list=load_op_list(self.dtype)))
        except PlanError:
            return None

    def spearman(self) -> tuple[float, int]:
        """Rank single nodes by their predicted and by their true errors."""
        from scipy.stats import spearmanr

        chosen = random.Random(0).sample(self.open, min(NODES, len(self.open)))
        pairs: list[tuple[float, float]] = []
        for node in chosen:
            amp_model = self.with_low([node.name])
            if amp_model is not None and amp_model.plan.error is not None:
                pairs.append((amp_model.plan.error, self.error(amp_model)))
        predicted, true = zip(*pairs, strict=True)
        return float(spearmanr(predicted, true).statistic), len(pairs)

    def ratios(self) -> list[float]:
        """The predicted error over the true one of whole random plans."""
        generator, found = random.Random(1), list[float]()
        while len(found) < PLANS:
            share = generator.uniform(0.2, 1.0)
            amp_model = self.with_low(n.name for n in self.open if generator.random() < share)
            if amp_model is not None and amp_model.plan.error:
                found.append(amp_model.plan.error / self.error(amp_model))
        return found


def _is_open(node: PlannedNode) -> bool:
    category, source = str(node.decision.category), node.decision.source
    return category in _FREE and not isinstance(source, Forced) and node.placement.run in _MOVES


def _placed(node: PlannedNode, is_low: bool) -> PlannedNode:
    run = Precision.LOW if is_low else Precision.FLOAT32
    return replace(node, placement=replace(node.placement, run=run, store=run, as_stored=()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models chosen, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help="a glob of names")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = Store(chosen.json, Row, {"transformers": __import__("transformers").__version__})
    done = {(row.model, row.dtype) for row in store.rows}
    for name, dtype in itertools.product(fnmatch.filter(MODELS, chosen.models), chosen.dtypes.split(",")):
        if (name, dtype) in done:
            continue
        if dtype == "float16" and ("CNN" in name or "ResNet" in name):
            print(f"{name:12} float16: convolutions take minutes on a CPU, left out", file=sys.stderr)
            continue
        row = measure(name, dtype)
        store.extend([row])
        print(f"{name:12} {dtype}: {row.seconds:.0f} s", file=sys.stderr, flush=True)
    print(table(store.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
