"""One op more in float32 and a lower price give plans that a cut alone does not find."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autocastfx import OpList, Plan
from autocastfx.numerics import plan_search as module
from autocastfx.numerics.plan_search import PlanSearch, cut_between
from tests.numerics.searches import search_of

Cut = Callable[[OpList, float], Plan]


class Branches(nn.Module):
    """Branches of several widths, each with a norm, so that a cut may leave many bytes of a limit unused."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 24, 40, 56)
        self.first, self.last = (nn.ModuleList(made) for made in zip(*map(self._products, widths), strict=True))
        self.norms = nn.ModuleList(map(nn.LayerNorm, widths))

    @staticmethod
    def _products(width: int) -> tuple[nn.Module, nn.Module]:
        return nn.Linear(16, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = zip(self.first, self.norms, self.last, strict=True)
        return torch.stack([last(F.gelu(norm(first(x)))) for first, norm, last in branches]).sum(0)


@pytest.fixture(scope="module")
def search() -> PlanSearch:
    return search_of(Branches)


@pytest.fixture(scope="module")
def sweep(search: PlanSearch) -> dict[float, Plan]:
    """All cuts of a fine sweep."""
    unit = search.start.traffic.moved / (search.start.error or 1.0) ** 2
    return {price: search._cut(OpList(), price) for price in (unit * 10 ** (i / 12) for i in range(-36, 37))}


def limits(sweep: dict[float, Plan]) -> list[float]:
    most = max(plan.traffic.moved for plan in sweep.values())
    return [share * most for share in (0.65, 0.7, 0.8, 0.9, 0.99)]


def start(sweep: dict[float, Plan], most: float) -> float:
    """The price of the dearest plan within a limit."""
    return max(price for price, plan in sweep.items() if plan.traffic.moved <= most)


def test_plans_keep_the_bytes_and_no_cut_has_so_little_error(search: PlanSearch, sweep: dict[float, Plan]) -> None:
    for most in limits(sweep):
        price = start(sweep, most)
        plans = [sweep[price], *cut_between(sweep[price], price, most, search._cut)]
        assert len(plans) > 1
        for before, after in itertools.pairwise(plans):
            assert after.traffic.moved <= most
            assert (after.error or 0.0) < (before.error or 0.0)
        cuts = [plan.error or 0.0 for plan in sweep.values() if plan.traffic.moved <= most]
        assert (plans[-1].error or 0.0) < min(cuts)


def recorded(cut: Cut) -> tuple[Cut, list[tuple[OpList, float]]]:
    calls: list[tuple[OpList, float]] = []

    def record(rules: OpList, price: float) -> Plan:
        calls.append((rules, price))
        return cut(rules, price)

    return record, calls


def test_the_price_is_lowered_until_the_bytes_are_kept(sweep: dict[float, Plan]) -> None:
    cheap, dear = sweep[min(sweep)], sweep[max(sweep)]
    cut, calls = recorded(lambda rules, price: dear)
    assert not list(cut_between(cheap, 8.0, cheap.traffic.moved, cut))
    assert [price for _, price in calls[:6]] == [8.0, 4.0, 2.0] * 2
    assert calls[0][0] == calls[2][0] != calls[3][0]
    cut, calls = recorded(lambda rules, price: cheap)
    assert not list(cut_between(cheap, 8.0, cheap.traffic.moved, cut)), "it has no less error"
    assert {price for _, price in calls} == {8.0}


def test_a_round_goes_on_with_the_rules_and_the_price_of_the_best_before(search: PlanSearch, sweep: Any) -> None:
    most = limits(sweep)[2]
    price = start(sweep, most)
    cut, calls = recorded(search._cut)
    plans = list(cut_between(sweep[price], price, most, cut))
    assert len(plans) > 1
    rules, paid = calls[-1]
    assert len(rules.modules) == len(plans) + 1, "the last round found no better plan"
    assert paid <= price


def test_cuts_are_limited(search: PlanSearch, sweep: dict[float, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    most = limits(sweep)[2]
    for limit in (1000, 5):
        monkeypatch.setattr(module, "_MOST_FURTHER_CUTS", limit)
        cut, calls = recorded(search._cut)
        list(cut_between(sweep[start(sweep, most)], start(sweep, most), most, cut))
        assert (len(calls) > 5) if limit > 5 else (len(calls) == 5)
