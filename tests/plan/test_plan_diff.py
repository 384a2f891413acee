"""What an edit of a list changed."""

from __future__ import annotations

import torch
from torch import nn

import autocastfx
from tests.helpers import text

MODEL = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8), nn.LayerNorm(8))
INPUTS = torch.randn(4, 32)


def plan(*rules: dict[str, object], model: nn.Module = MODEL) -> autocastfx.Plan:
    lists = ["default", *(autocastfx.OpList.of(rule, name="mine") for rule in rules)]
    return autocastfx.convert(model, (INPUTS,), dtype=torch.bfloat16, op_list=lists).plan


def test_a_node_that_moved_is_shown_with_both_reasons() -> None:
    found = autocastfx.diff(plan(), plan({"deny": [{"reason": "loses accuracy here", "ops": ["gelu"]}]}))
    assert found
    assert [(d.name, d.moved) for d in found.changed] == [("gelu", True)]
    assert str(found) == text("""
        plans: bfloat16 on cpu, op list bfloat16 → bfloat16 on cpu, op list bfloat16+mine
        nodes moved: 1 from low to float32; with another reason alone: 0; removed: 0; added: 0
        casts: 6 → 8; bytes moved: 24,704 → 28,800
        node  op    runs           reason
        gelu  gelu  low → float32  deny: loses accuracy here (mine:deny[0].ops[0]), before: fewest bytes moved; """) + (
        "infer: bounded or linear activations; the kernels compute in float32 inside (op_lists/base.yaml:57:11)"
    )


def test_another_reason_alone_comes_after_what_moved() -> None:
    rules = {"deny": [{"reason": "mine", "ops": ["layer_norm", "gelu"]}]}
    found = autocastfx.diff(plan(), plan(rules))
    assert [(d.name, d.moved) for d in found.changed] == [("gelu", True), ("layer_norm", False)]
    assert "nodes moved: 1 from low to float32; with another reason alone: 1;" in str(found)


def test_plans_that_say_the_same_differ_in_nothing() -> None:
    found = autocastfx.diff(plan(), plan())
    assert not found
    assert str(found).splitlines()[1:] == [
        "nodes moved: none; with another reason alone: 0; removed: 0; added: 0",
        "casts: 6 → 6; bytes moved: 24,704 → 24,704",
    ]


def test_nodes_of_one_plan_alone_are_listed() -> None:
    longer = nn.Sequential(*MODEL, nn.Tanh())
    added = autocastfx.diff(plan(), plan(model=longer))
    removed = autocastfx.diff(plan(model=longer), plan())
    assert [node.name for node in added.added] == [node.name for node in removed.removed] == ["tanh"]
    assert "removed: 0; added: 1" in str(added)
    assert any(line.startswith("tanh") and "removed" in line for line in str(removed).splitlines())


def test_plans_compare_after_a_round_trip_through_json() -> None:
    assert not autocastfx.diff(plan(), autocastfx.Plan.from_json(plan().to_json()))


def test_a_missing_reason_is_said() -> None:
    text = str(autocastfx.diff(plan(), plan({"deny": ["gelu"]})))
    assert "deny: no reason given (mine:deny[0]), before: " in text
