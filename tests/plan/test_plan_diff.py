"""What an edit of a list changed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.plan.plan import PlannedNode
from tests.decided import decided
from tests.helpers import text

MODEL = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8), nn.LayerNorm(8))
INPUTS = torch.randn(4, 32)


def plan(*rules: dict[str, object], model: nn.Module = MODEL) -> autocastfx.Plan:
    lists = ["default", *(autocastfx.OpList.of(rule, name="mine") for rule in rules)]
    return decided(model, INPUTS, dtype=torch.bfloat16, op_list=lists).plan


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


class Scales(nn.Module):
    """Layers and products by numbers; with ``first``, one product more before all others."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 7 if self.first else x
        x = self.layer(x * 3) * 2
        return torch.softmax(x, -1) * 5 + torch.softmax(x * 2, -1) * 5


def by_numbers(before: autocastfx.Plan, after: autocastfx.Plan) -> tuple[list[str], list[str], list[str]]:
    """Names of nodes that changed, were added and were removed, both ways the same."""
    found, back = autocastfx.diff(before, after), autocastfx.diff(after, before)
    names = [[n.name for n in nodes] for nodes in (found.added, found.removed, back.removed, back.added)]
    assert names[:2] == names[2:]
    assert len(found.changed) == len(back.changed)
    return [d.name for d in found.changed], *names[:2]


def test_an_op_put_in_before_others_is_added_alone() -> None:
    before, after = plan(model=Scales()), plan(model=Scales(first=True))
    runs = [{n.name: n.placement.run for n in found.nodes if n.op == "mul"} for found in (before, after)]
    assert any(runs[1][name] is not run for name, run in runs[0].items()), "names alone would tell of moves"
    assert by_numbers(before, after) == ([], ["mul_1"], [])  # of two in a row, either may be new
    after = plan({"deny": [{"reason": "mine", "ops": ["add"]}]}, model=Scales(first=True))
    assert by_numbers(before, after) == (["add"], ["mul_1"], [])


def test_a_layer_put_in_before_others_is_added_alone() -> None:
    front = nn.Sequential(MODEL[0], nn.Tanh(), *MODEL[1:])
    assert by_numbers(plan(), plan(model=front)) == ([], ["tanh"], [])
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Softmax(-1)) for _ in range(3)]
    last = nn.Sequential(nn.LayerNorm(32), nn.GELU())
    before, after = (plan(model=nn.Sequential(*blocks[:many], last)) for many in (2, 3))
    assert by_numbers(before, after) == ([], ["linear_2", "softmax_2"], [])


class Steps(nn.Module):
    """Equal steps; with ``at``, a ReLU before the step of that number."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(6):
            x = torch.relu(x) if number == self.at else x
            x = torch.sin((x @ x.mT).sum(-1, keepdim=True) + x) * x
        return x


@pytest.mark.parametrize("at", [0, 2, 3, 5])
def test_equal_steps_stay_what_they_were(at: int) -> None:
    assert by_numbers(plan(model=Steps()), plan(model=Steps(at))) == ([], ["relu"], [])


def test_causes_and_reasons_that_name_nodes_follow_their_names() -> None:
    before = plan(model=Steps())
    names = {node.name: f"{node.name}_9" for node in before.nodes}

    def renamed(node: PlannedNode) -> PlannedNode:
        cause = replace(node.placement.because, nodes=tuple(names[n] for n in node.placement.because.nodes))
        reason = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), node.decision.reason)
        placed, decided = replace(node.placement, because=cause), replace(node.decision, reason=reason)
        return replace(node, name=names[node.name], placement=placed, decision=decided)

    after = replace(before, nodes=tuple(map(renamed, before.nodes)))
    assert any(n.placement.because.nodes for n in after.nodes)
    assert any("sin_9" in n.decision.reason for n in after.nodes)
    assert not autocastfx.diff(before, after)


def test_models_are_no_plans() -> None:
    amp_model = autocastfx.convert(nn.Linear(4, 4), torch.randn(2, 4))
    for given in ((amp_model, amp_model.plan), (amp_model.plan, amp_model), (amp_model.plan, None)):
        with pytest.raises(TypeError, match=r"diff compares plans, as amp_model\.plan, not \w+$"):
            autocastfx.diff(*given)  # pyright: ignore[reportArgumentType]


def test_a_difference_is_shown_in_a_line() -> None:
    plan = decided(nn.Linear(4, 4), torch.randn(2, 4)).plan
    found = autocastfx.diff(plan, plan)
    assert repr(found) == f"PlanDiff({'; '.join(found.summary)})"
    assert len(repr(found)) < 300


def test_another_place_of_a_float8_rule_moves_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.ones(16, 32)
    part = {"path": "0", "float8": {"products": ["output"]}}
    lists = [
        autocastfx.OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"]}], "modules": modules})
        for modules in ([part], [{"path": "1", "category": "allow"}, part], [{**part, "float8": False}])
    ]
    plans = [autocastfx.convert(model, x, dtype="bfloat16", op_list=one, check=False).plan for one in lists]
    assert [d.moved for d in autocastfx.diff(plans[0], plans[1]).changed if d.name == "linear"] == [False]
    assert [d.moved for d in autocastfx.diff(plans[0], plans[2]).changed if d.name == "linear"] == [True]


def test_against_torch_autocasts_dispatch_the_bytes_of_casts_are_compared() -> None:
    ours, theirs = (
        autocastfx.convert(nn.Linear(64, 64), torch.ones(2, 64), dtype="bfloat16", op_list=name, check=False).plan
        for name in ("default", "torch_autocast_cpu")
    )
    by_casts = [sum(cast.bytes for cast in one.casts) for one in (theirs, ours)]
    assert min(by_casts) > 0
    assert f"bytes moved by casts: {by_casts[0]:,} → {by_casts[1]:,}" in str(autocastfx.diff(theirs, ours))
