"""A search measures the plans that its predictions, scaled by what was measured so far, find best within the limit."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import OpList
from autocastfx.errors import SensitivityError
from autocastfx.numerics.plan_search import Found, Limit, PlanSearch, Point, _next
from autocastfx.plan.plan import Plan, Precision, Prices
from tests.numerics.searches import search_of


@functools.cache
def plan_of_one() -> Plan:
    return autocastfx.convert(nn.Linear(4, 4), torch.randn(2, 4), dtype="bfloat16").plan


def found(moved: int, predicted: float, measured: float | None = None) -> Found:
    plan = replace(plan_of_one(), traffic=replace(plan_of_one().traffic, moved=moved), error=predicted)
    return Found(Point("cut", moved, predicted, measured), plan)


@pytest.mark.parametrize(("predicted", "is_measured"), [(0.99, True), (1.01, False)])
def test_a_plan_predicted_beyond_a_limit_of_errors_is_not_measured(predicted: float, is_measured: bool) -> None:
    plan = found(100, predicted)
    assert _next([plan], Limit(error=1.0), [1.0], []) == (plan if is_measured else None)


@pytest.mark.parametrize(("ratios", "moved"), [([1.0], 100), ([1.0, 2.0, 2.0], 200)])
def test_predictions_are_scaled_by_what_was_measured(ratios: list[float], moved: int) -> None:
    plans = [found(100, 0.9), found(200, 0.45)]
    chosen = _next(plans, Limit(error=1.0), ratios, [])
    assert chosen is not None
    assert chosen.point.bytes == moved


@pytest.mark.parametrize(("predicted", "is_measured"), [(1.2, True), (1.3, False)])
def test_within_a_limit_of_bytes_one_predicted_a_little_worse_is_measured(predicted: float, is_measured: bool) -> None:
    tried, plan = found(90, 1.0, measured=1.0), found(100, predicted)
    assert _next([plan], Limit(bytes=100), [1.0], [tried]) == (plan if is_measured else None)
    assert _next([plan], Limit(bytes=99), [1.0], [tried]) is None


@pytest.fixture
def search() -> PlanSearch:
    return search_of(_norms, probes=8)


def _norms() -> nn.Module:
    layers = [[nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()] for a, b in ((16, 32), (32, 8), (8, 24))]
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(24, 4))


def test_the_fewest_bytes_are_found_however_large_their_error(search: PlanSearch) -> None:
    """An error that is large beside the start's never pays at a price that suits the start's."""
    search.start = replace(search.start, error=1e-9)
    floor = search._cut(OpList(), 0.0)
    assert floor.traffic.moved < search._cut(OpList(), 1e18).traffic.moved
    limit = Limit(bytes=floor.traffic.moved)
    found = [one.plan for one in search._candidates(limit, 1.0) if limit.keeps(one.point)]
    assert [plan.traffic.moved for plan in found] == [floor.traffic.moved]


@pytest.mark.parametrize("share", [0.8, 0.9])
def test_bytes_that_a_cut_leaves_are_spent(search: PlanSearch, share: float) -> None:
    limit = Limit(bytes=share * search._cut(OpList(), 1e18).traffic.moved)
    cuts = [one.point.predicted for one in search.cuts.values() if one.point.bytes <= (limit.bytes or 0)]
    found = [one.plan.error or 0.0 for one in search._candidates(limit, 1.0) if limit.keeps(one.point)]
    assert min(found) < min(cuts)


def test_a_plan_is_measured_once_however_its_rules_say_it(search: PlanSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autocastfx.numerics.plan_search.convert_captured", lambda *_: None)
    judged = list[Any]()
    candidates = PlanSearch._candidates

    def twice(self: PlanSearch, limit: Limit, ratio: float) -> list[Found]:
        found = [self._said(one, 0.0) for one in candidates(self, limit, ratio)]
        more = OpList.of({"modules": [{"path": "no.such.module", "category": "float32"}]})
        return [*found, *(replace(one, rules=(one.rules or OpList()).merged(more)) for one in found)]

    monkeypatch.setattr(PlanSearch, "_candidates", twice)
    start = Point("start", search.start.traffic.moved, search.start.error or 0.0, search.start.error)
    limit = Limit(bytes=0.9 * search._cut(OpList(), 1e18).traffic.moved)
    _, points = search.result(lambda *given: judged.append(given) or 0.5, limit, start)  # type: ignore[arg-type]
    measured = [(one.bytes, one.predicted) for one in points[:-1] if one.measured is not None]
    assert len(judged) == len(measured) == len(set(measured)) > 1


@pytest.mark.parametrize("of", ["bytes", "error"])
def test_a_budget_that_no_plan_keeps_names_the_nearest(search: PlanSearch, of: str) -> None:
    start = Point("start", search.start.traffic.moved, search.start.error or 0.0, 0.5)
    floor = search._cut(OpList(), 0.0)
    limit = Limit(bytes=floor.traffic.moved - 1) if of == "bytes" else Limit(error=0.1)
    nearest = Found.of("cut", floor).point if of == "bytes" else start
    with pytest.raises(SensitivityError, match=f"no plan keeps the budget .*the nearest has {re.escape(str(nearest))}"):
        search.result(lambda *_: 0.6, limit, start)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_said", [True, False])
def test_what_a_person_says_is_placed_by_no_price(is_said: bool) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    said = [{"path": "0", "category": "low"}] if is_said else []
    lists = ["default", OpList.of({"modules": said})]
    base = autocastfx.convert(model, x, dtype="bfloat16", op_list=lists, check=False)
    effects = autocastfx.sensitivity(model, [x], lambda y, _: y.sum(), dtype="bfloat16", op_list=lists, progress=False)
    search = PlanSearch(base, base._variant_for((x,), {}), Prices(effects), torch.bfloat16)
    plan = search._cut(OpList(), 1e12)  # an error costs more than any bytes
    assert [plan[name].placement.run for name in ("linear", "linear_1")] == [
        *(Precision.LOW if is_said else Precision.FLOAT32, Precision.FLOAT32)
    ]
