"""A plan as rules by module and op."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import nn

import autocastfx
from autocastfx import OpList, Plan, Sensitivity
from autocastfx.conversion import convert_again
from autocastfx.numerics.plan_search import rules_for
from autocastfx.plan.plan import Placement, Precision
from autocastfx.plan.sensitivity import Effect


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.exp()


@functools.cache
def base() -> autocastfx.AmpModule:
    return autocastfx.convert(Model(), torch.randn(4, 8), dtype="bfloat16", fold="none")


def measured() -> Sensitivity:
    effects = tuple(Effect("eval", n.name, n.op, n.module, (1e-3,)) for n in base().plan.nodes)
    return Sensitivity("gradient", "bfloat16", 1, 1, effects)


def converted(rules: OpList) -> Plan:
    again = convert_again(base(), rules)
    assert again is not None
    return again.plan


def wanted(low: set[str], float32: set[str]) -> Plan:
    """The plan with the named nodes changed."""

    def placed(name: str, was: Placement) -> Placement:
        run = Precision.LOW if name in low else Precision.FLOAT32 if name in float32 else was.run
        return replace(was, run=run, store=run)

    return replace(
        base().plan, nodes=tuple(replace(n, placement=placed(n.name, n.placement)) for n in base().plan.nodes)
    )


def nodes(op: str, module: str = "") -> list[str]:
    return [n.name for n in base().plan.nodes if n.op == op and n.module.startswith(module)]


def test_layers_that_agree_share_a_rule() -> None:
    rules, plan = rules_for(wanted(set(nodes("layer_norm")), set()), base().plan, converted, measured())
    assert [(r.path, r.wanted, r.ops) for r in rules.modules] == [("layers.*.norm", "low", ("layer_norm",))]
    assert all(plan[name].placement.run is Precision.LOW for name in nodes("layer_norm"))


def test_a_layer_that_differs_has_its_own() -> None:
    (one,) = nodes("linear", "layers.1")
    rules, plan = rules_for(wanted(set(), {one}), base().plan, converted, measured())
    assert [(r.path, r.wanted) for r in rules.modules if "linear" in r.ops] == [("layers.1.linear", "float32")]
    runs = {n.name: n.placement.run for n in plan.nodes if n.op == "linear"}
    assert runs == {name: Precision.FLOAT32 if name == one else Precision.LOW for name in nodes("linear")}
    (rule,) = (r for r in rules.modules if "linear" in r.ops)
    assert rule.reason == "tuned: in 16 bits it would add 1.0e-03 to the gradient's error of 0.0e+00"


def test_the_root_has_rules_too() -> None:
    rules, plan = rules_for(wanted({"exp"}, set()), base().plan, converted, measured())
    assert [(r.path, r.wanted, r.ops) for r in rules.modules] == [("re:^$", "low", ("exp",))]
    assert plan["exp"].placement.run is Precision.LOW


def test_a_plan_that_is_there_needs_no_rules() -> None:
    rules, plan = rules_for(base().plan, base().plan, converted, measured())
    assert not rules.modules
    assert plan.nodes == base().plan.nodes
