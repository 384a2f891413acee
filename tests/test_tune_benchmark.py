"""The benchmark of tuning: scores of nodes, plans at equal bytes, its tables, and what tuning finds unaided."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx import Sensitivity
from autocastfx.numerics.compare import TargetError
from autocastfx.numerics.plan_search import PlanSearch
from autocastfx.plan.plan import Prices
from benchmarks import pictures, tune, tune_finds
from benchmarks.tune_cost import Cost
from benchmarks.tune_judge import Bench, Judged, measured
from benchmarks.tune_models import Case
from benchmarks.tune_scores import SCORES, at_bytes, cheapest, random_scores, scored, scores
from benchmarks.tune_table import OURS, Row, table

LOW = torch.bfloat16


class Norms(nn.Module):
    """Two products with norms between, which are float32 in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 4)
        self.norm, self.other = nn.LayerNorm(64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(F.gelu(self.norm(self.first(x)))))


def _batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(256, 32, generator=generator), torch.randint(4, (256,), generator=generator)


def _loss(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


CASE = Case(Norms, _batches, _loss, lambda batch: batch[0])
BATCHES = list(itertools.islice(_batches(0), 4))


@pytest.fixture(scope="module")
def bench() -> Bench:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Norms().train()
    base = autocastfx.convert(model, BATCHES[0][0], dtype=LOW)
    return Bench(model, CASE, "bfloat16", measured(base, CASE, BATCHES[:2]), BATCHES[2:])


def test_scores_are_what_they_are_called(bench: Bench) -> None:
    model, (x, labels) = bench.model, BATCHES[0]
    found = scores(bench.base, CASE, BATCHES[:1], LOW)
    made = [x]
    for layer in (model.first, model.norm, F.gelu, model.other, model.last):
        made.append(layer(made[-1]))
        made[-1].retain_grad()
    grads = torch.autograd.grad(F.cross_entropy(made[-1], labels), made[1:])
    names = ("linear", "layer_norm", "gelu", "layer_norm_1", "linear_1")
    for name, value, gradient in zip(names, made[1:], grads, strict=True):
        change = value.detach().to(LOW).float() - value.detach()
        assert found["g2d2"][name] == pytest.approx([float((gradient * change).norm())])
        assert found["first order"][name] == pytest.approx([abs(float((gradient * change).sum()))], rel=1e-3, abs=1e-9)
        assert found["local error"][name] == pytest.approx([float(change.norm() / value.detach().norm())])
    assert all(p.grad is None for p in model.parameters())
    assert all(set(by_value) == set(found["g2d2"]) for by_value in found.values())
    assert len(found["g2d2"]["x"]) == 1, "an input is a value that is rounded too"


def test_statistics_of_batch_norms_are_not_scored() -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    base = autocastfx.convert(model, BATCHES[0][0], dtype=LOW)
    found = scores(base, Case(lambda: model, _batches, _loss, lambda batch: batch[0]), BATCHES[:1], LOW)
    assert found["g2d2"]["batch_norm"][0] > 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_score_takes_the_place_of_the_effects(bench: Bench) -> None:
    found = replace(bench.found, effects=tuple(replace(e, overflows=e.name == "gelu") for e in bench.found.effects))
    mine = scored(found, {"linear": (0.5, 0.25), "gelu": (2.0, 2.0)})
    assert (mine.probes, mine.batches) == (1, 2)
    assert mine["linear"].computes == (0.5, 0.25)
    assert mine["layer_norm"].reads == {**dict.fromkeys(found["layer_norm"].reads, (0.0, 0.0)), "linear": (0.5, 0.25)}
    assert mine["layer_norm_1"].reads["gelu"] == (2.0, 2.0)
    assert not any(effect.returns for effect in mine.effects)
    assert [e.name for e in mine.effects if e.overflows] == ["gelu"]
    unmeasured = replace(found, effects=tuple(replace(e, computes=()) for e in found.effects))
    assert all(effect.computes == () for effect in scored(unmeasured, {"linear": (1.0, 1.0)}).effects)


def test_random_scores_differ_by_seed_alone() -> None:
    names = ["b", "a"]
    first = random_scores(names, 0, 2)
    assert first == random_scores(reversed(names), 0, 2) != random_scores(names, 1, 2)
    assert all(len(set(score)) == 1 and len(score) == 2 for score in first.values())


def _search(bench: Bench, found: Sensitivity) -> PlanSearch:
    return bench.search(found, Prices(found))


def test_plans_keep_the_bytes_and_the_more_bytes_the_less_error(bench: Bench) -> None:
    search = _search(bench, bench.found)
    least, most = cheapest(search).traffic.moved, max(plan.traffic.moved for plan in _sweep(search))
    assert least < most
    judge = TargetError(bench.model, BATCHES[2:], CASE.loss, "gradient", CASE.inputs)
    plans = [at_bytes(search, least + share * (most - least), judge) for share in (0.0, 0.5, 1.0)]
    errors = list[float]()
    for share, found in zip((0.0, 0.5, 1.0), plans, strict=True):
        assert found is not None
        assert found.point.bytes <= least + share * (most - least)
        judged = bench.said(search, found)
        assert judged.bytes == found.point.bytes
        errors.append(judged.error)
    assert errors[0] >= errors[1] >= errors[2]
    assert errors[0] > errors[2]
    assert at_bytes(search, least - 1, judge) is None


def _sweep(search: PlanSearch) -> list[Any]:
    for decade in range(-2, 5):
        search._at(search.start.traffic.moved / (search.start.error or 1.0) ** 2 * 10.0**decade)
    return list(search.plans.values())


def test_each_score_chooses_a_plan_of_its_own_budget(bench: Bench) -> None:
    most = bench.judge(bench.base).bytes
    judge = TargetError(bench.model, BATCHES[2:], CASE.loss, "gradient", CASE.inputs)
    for score in scores(bench.base, CASE, BATCHES[:2], LOW).values():
        found = at_bytes(_search(bench, scored(bench.found, score)), most, judge)
        assert found is not None
        assert found.point.bytes <= most


def test_predictions_and_errors_of_the_judged_batches_agree(bench: Bench) -> None:
    rank, count = bench.spearman()
    assert count == len(bench.open) > 3
    assert rank > 0.5
    here, unseen = bench.ratios()
    assert len(here) == len(unseen) == 8
    assert all(0.5 < ratio < 2 for ratio in here)
    assert here != unseen


def test_below_is_the_best_plan_of_no_more_bytes() -> None:
    at, cheap, dear = Judged(10, (1.0, 3.0)), Judged(9, (0.5, 3.0)), Judged(11, (0.0, 0.0))
    ratio, noise = tune._below([dear, cheap], at, at)
    assert ratio == pytest.approx((9.25 / 10) ** 0.5)
    assert noise == pytest.approx(0.25)
    assert tune._below([dear], at, at)[0] == float("inf")
    assert tune._below([dear], replace(at, bytes=0), Judged(11, (1.0, 1.0)))[0] == 0, "bytes that are not counted"


def test_errors_are_compared_batch_by_batch() -> None:
    one, other = Judged(10, (1.0, 3.0)), Judged(10, (2.0, 3.0))
    assert tune._ratio(one, other) == pytest.approx([(10 / 13) ** 0.5, 0.25])
    exact = Judged(10, (0.0, 0.0))
    assert tune._ratio(exact, exact) == [1.0, 0.0]
    assert tune._ratio(one, exact)[0] == float("inf")


ROW = Row(
    **{"model": "a", "dtype": "bfloat16", "nodes": 4, "spearman": 0.9, "plans": [0.8, 1.2], "unseen": [0.6, 1.2]},
    **{
        "products": 30.0,
        "evaluations": 40.0,
        "memory": 2.0,
        "error": 0.01,
        "bytes": 100,
        "fewer_bytes": 0.8,
        "fewer_error": 1.0,
    },
    lists={"fold=kernel": [0.9, 1.1], "conservative": [1.5, 1.0], "torch_autocast_cuda": [0.0, 1.0]},
    **{"float32_left": 0.1, "nearer_bytes": 1.0, "nearer_error": 0.5, "verdict": "gains", "seconds": 1.0},
    kernel=[0.7, 1.1],
    front=[[0.8, 1.0], [1.0, 0.5], [1.2, 0.0]],
    below={"default": [0.5, 0.1], "fold=kernel": [1.1, 0.06]},
    scores={"default": {OURS: [1.0, 0.5], "g2d2": [1.0, 2.0, 0.5], "random": [0.9, 0.99, 0.001]}},
)


def test_the_tables_count_what_meets_its_mark() -> None:
    misses = replace(ROW, model="b", spearman=0.8, plans=[0.6, 1.0], unseen=[1.0, 1.4], memory=4.0, verdict="little")
    misses = replace(misses, below={"conservative": [1.3, 0.1]}, scores={})
    said = table([ROW, misses])
    assert "Spearman at least 0.85: 1 of 2." in said
    assert "Plans predicted within 0.7 to 1.5: 1 of 2; from other batches: 1 of 2." in said
    assert Cost.within([ROW, misses]) in said
    assert "On or below every list's point: 1 of 2; b bfloat16 is above conservative (1.30 ± 0.10)" in said
    assert "Gains on 1 of 2 models: a." in said
    by = {line.split(":")[0]: line for line in said.splitlines() if line.startswith("By ")}
    assert by["By g2d2"] == (
        "By g2d2: 2.00 times on average. Larger in 0 of 1 by more than two standard errors, and smaller in 0, in 0 of "
        "these with more bytes."
    ), "2.00 is not beyond 1 + 2 * 0.5"
    assert by["By random"] == (
        "By random: 0.99 times on average. Larger in 0 of 1 by more than two standard errors, and smaller in 1, in 0 "
        "of these with more bytes."
    )
    assert "1.00 2.00±0.50x" in said


def test_without_scores_and_with_errors_of_0() -> None:
    assert table([replace(ROW, scores={})]).endswith("Gains on 1 of 1 models: a.")
    assert table([replace(ROW, nearer_error=0.0, scores={})]).endswith("Gains on 0 of 1 models: none.")
    assert "  float32" in table([replace(ROW, nearer_error=0.0)])
    infinite = [1.0, float("inf"), 0.0]
    exact = replace(ROW, scores={"default": {OURS: [1.0, 0.0], "g2d2": [1.0, 1.0, 0.0], "random": infinite}})
    assert "By g2d2: 1.00 times on average. Larger in 0 of 1 " in table([exact])
    assert "By random: nan times on average. Larger in 1 of 1 " in table([exact])
    dear = replace(ROW, scores={"default": {OURS: [0.9, 0.5], "g2d2": [1.0, 0.9, 0.01]}})
    assert "and smaller in 1, in 1 of these with more bytes." in table([dear])


def test_the_picture_holds_the_front_and_all_lists() -> None:
    pytest.importorskip("matplotlib")
    beaten = replace(ROW, front=[*ROW.front, [0.9, 1.5]])
    (axis,) = pictures._tune_front([beaten]).axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axis.get_lines()}
    assert lines["tuned"] == [(0.8, 1.0), (1.0, 0.5)]
    assert lines["tuned, fold=kernel"] == [(0.7, 1.1)]
    texts = {text.get_text() for text in axis.texts} | set(lines)
    assert {"default", "fold=kernel", "conservative", "torch_autocast_cuda, bytes not counted"} <= texts


def test_scores_have_names() -> None:
    assert set(scores(_base(), CASE, BATCHES[:1], LOW)) == set(SCORES)


def _base() -> autocastfx.AmpModule:
    return autocastfx.convert(Norms().train(), BATCHES[0][0], dtype=LOW)


def test_the_start_of_what_is_to_be_found_protects_nothing() -> None:
    find = tune_finds.FINDS["positions"]
    given = next(find.batches(0))[0]
    plan = autocastfx.convert(find.build(), given, dtype=LOW, op_list=tune_finds.unprotected()).plan
    runs = {str(node.placement.run) for node in plan.nodes if node.module == "angles" and node.op in ("mul", "sin")}
    assert runs == {"low"}


@pytest.mark.slow
@pytest.mark.parametrize("name", tune_finds.FINDS)
def test_what_needs_float32_is_found_unaided(name: str) -> None:
    found = tune_finds.found(tune_finds.FINDS[name])
    assert found.is_found
    assert found.start > 1.5 * found.tuned
    assert not replace(found, kept=found.named - 1).is_found
    assert not replace(found, rounded=found.tuned).is_found
