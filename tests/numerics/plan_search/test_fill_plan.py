"""Further ops run in float32 while a limit leaves bytes, those first that add most to the error of the plan."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autocastfx import OpList, Plan
from autocastfx.numerics import plan_search
from autocastfx.numerics.plan_search import PlanSearch, filled
from autocastfx.plan.plan import Precision
from autocastfx.plan.sensitivity import added, rms
from tests.numerics.searches import search_of


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.norm, self.other = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(F.gelu(self.norm(self.first(x)))))


@pytest.fixture(scope="module")
def search() -> PlanSearch:
    return search_of(Norms)


@pytest.fixture(scope="module")
def cheap(search: PlanSearch) -> Plan:
    """All in 16 bits."""
    return search._plan_of(search._with(LOW))


LOW = OpList.of({"modules": [{"path": "**", "category": "low"}]})


def low(plan: Plan) -> set[str]:
    return {node.name for node in plan.nodes if node.placement.run is Precision.LOW}


def test_each_plan_has_less_error_and_keeps_the_bytes(search: PlanSearch, cheap: Plan) -> None:
    def convert(rules: OpList) -> Plan:
        return search._plan_of(search._with(rules))

    most = 1.6 * cheap.traffic.moved
    plans = [cheap, *filled(LOW, cheap, most, convert)]
    assert len(plans) > 2
    for before, after in itertools.pairwise(plans):
        assert (after.error or 0.0) < (before.error or 0.0)
        assert after.traffic.moved <= most
        assert low(after) < low(before)
    assert not list(filled(LOW, cheap, cheap.traffic.moved - 1, convert))


def test_no_more_ops_are_tried_than_allowed(search: PlanSearch, cheap: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_search, "_MOST_GROUPS", 2)
    tried: list[OpList] = []

    def convert(rules: OpList) -> Plan:
        tried.append(rules)
        return cheap

    assert not list(filled(LOW, cheap, math.inf, convert))
    assert len(tried) == 2


def test_an_op_counts_by_what_the_error_is_without_it(cheap: Plan) -> None:
    """Two errors that cancel are left alone, however large, and one that adds to another comes first."""
    effects = {"linear": (3.0, 0.0), "layer_norm": (-3.0, 0.0), "gelu": (0.0, 1.0), "linear_1": (0.0, 0.5)}
    assert effects.keys() <= low(cheap)
    plan = replace(cheap, nodes=tuple(replace(n, effect=effects.get(n.name, ())) for n in cheap.nodes))
    assert plan_search.by_share(plan) == [("", "gelu"), ("last", "linear")]
    whole = added(effects.values())
    without = {name: rms(added([whole, tuple(-e for e in effect)])) for name, effect in effects.items()}
    assert without["linear"] > rms(whole) > without["linear_1"] > without["gelu"]
