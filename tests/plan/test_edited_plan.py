"""A conversion obeys a plan that a person edited: it does exactly the edit, or refuses it."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import Plan
from autocastfx.errors import PlanError, UnmatchedPlanWarning
from autocastfx.policy.kernel_facts import load_kernel_facts
from tests.decided import decided
from tests.helpers import Function, op_list, unchecked


class Model(nn.Module):
    """An allow op, infer and clear ops, deny ops, a tuple, a comparison, an island and a mutated storage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.fc1(x).tanh().split(8, -1)
        y = self.fc2(torch.where(a > b, a, b)).softmax(-1).mul(2).view(-1, 8)
        z = y.clone()
        z.view(-1).mul_(3.0)
        return self.fc3(y + z).float().exp() + y.mean(dtype=torch.float32)


X = torch.linspace(-1, 1, 24).view(3, 8)


def convert(plan: Any = None, **options: Any) -> autocastfx.AmpModule:
    options.setdefault("dtype", torch.bfloat16)
    return autocastfx.convert(Model().eval(), (X,), plan=plan, **options)


@pytest.fixture(scope="module")
def usual() -> Plan:
    return convert().plan


def edited(plan: Plan, path: Path, *edits: tuple[str, str, str, str], lines: set[str] | None = None) -> Path:
    """The text of ``plan`` with (node, part, key, value) edited, and only the lines of some nodes."""
    data = json.loads(plan.to_json())
    for name, part, key, value in edits:
        (node,) = [n for n in data["nodes"] if n["name"] == name]
        node[part][key] = value
    if lines is not None:
        data["nodes"] = [n for n in data["nodes"] if n["name"] in lines]
    file = path / "plan.json"
    file.write_text(json.dumps(data, indent=1))
    return file


def placed(name: str, to: str) -> tuple[tuple[str, str, str, str], ...]:
    return ((name, "placement", "run", to), (name, "placement", "store", to))


def moved(before: Plan, after: Plan) -> dict[str, str]:
    assert [n.name for n in before.nodes] == [n.name for n in after.nodes]
    return {a.name: str(a.placement.run) for b, a in zip(before.nodes, after.nodes, strict=True) if a != b}


def test_an_unedited_plan_changes_nothing(usual: Plan, tmp_path: Path) -> None:
    for plan in (usual, str(edited(usual, tmp_path)), edited(usual, tmp_path)):
        assert convert(plan).plan == usual


@pytest.mark.parametrize("to", ["low", "float32"])
def test_each_node_can_be_moved_alone_or_is_refused(usual: Plan, tmp_path: Path, to: str) -> None:
    """What cannot move alone: what shares memory, is taken out of a tuple, or must stay float32."""
    refused: dict[str, str] = {}
    candidates = [n for n in usual.nodes if str(n.placement.run) not in (to, "captured")]
    for node in candidates:
        path = edited(usual, tmp_path, *placed(node.name, to))
        try:
            amp_model = convert(path)
        except PlanError as error:
            refused[node.name] = str(error)
            continue
        taken_out = ("getitem", "getitem_1") if node.name == "split" else ()
        assert moved(usual, amp_model.plan) == dict.fromkeys((node.name, *taken_out), to)
        decision = amp_model.plan[node.name].decision
        assert str(decision.source).startswith(f"{path}:")
        assert f'"name": "{node.name}"' in path.read_text().splitlines()[int(str(decision.source).split(":")[1])]
        # The graph does what its plan says: no result is further away than a few roundings.
        assert torch.allclose(amp_model(X), Model().eval()(X), rtol=16 * torch.finfo(torch.bfloat16).eps)
        assert convert(amp_model.plan).plan.by_op() == amp_model.plan.by_op()
    expected = {"low": {"to", "mean", "clone", "view_1", "mul_"}, "float32": {"getitem", "getitem_1"}}
    assert set(refused) == expected[to], refused
    assert len(candidates) > len(refused)


def test_a_tuple_moves_with_what_is_taken_out_of_it(usual: Plan, tmp_path: Path) -> None:
    amp_model = convert(edited(usual, tmp_path, *placed("split", "float32")))
    assert set(moved(usual, amp_model.plan)) == {"split", "getitem", "getitem_1"}
    both = [e for name in ("split", "getitem", "getitem_1") for e in placed(name, "float32")]
    again = convert(edited(usual, tmp_path, *both))
    assert set(moved(usual, again.plan)) == {"split", "getitem", "getitem_1"}


def test_what_shares_memory_moves_together(usual: Plan, tmp_path: Path) -> None:
    names = ("clone", "view_1", "mul_")
    amp_model = convert(edited(usual, tmp_path, *(e for name in names for e in placed(name, "low"))))
    assert moved(usual, amp_model.plan) == dict.fromkeys(names, "low")
    with pytest.raises(PlanError, match=r"cannot run .* What shares memory with it, or is taken out of it, has to be"):
        convert(edited(usual, tmp_path, *placed("mul_", "low")))


def test_a_category_alone_decides_as_a_list_would(usual: Plan, tmp_path: Path) -> None:
    def category(name: str, to: str) -> dict[str, str]:
        return moved(usual, convert(edited(usual, tmp_path, (name, "decision", "category", to))).plan)

    assert category("softmax", "allow") == {"softmax": "low"}
    assert category("linear_1", "deny") == category("linear_1", "keep") == {"linear_1": "float32"}
    assert category("tanh", "deny") == {"tanh": "float32"}
    now = convert(
        edited(
            usual, tmp_path, ("softmax", "decision", "category", "allow"), ("softmax", "decision", "reason", "tried")
        )
    )
    decision = now.plan["softmax"].decision
    assert (str(decision.category), decision.reason) == ("allow", "tried")
    with pytest.raises(PlanError, match=r"plan\.json:\d+:\d+: a plan cannot ban a node, as it does 'tanh'"):
        category("tanh", "ban")
    with pytest.raises(PlanError, match=r"node 'mean' \(mean\) cannot run in 16 bits: the call names dtype=float32\."):
        category("mean", "allow")


def test_a_plan_wins_over_every_rule_of_a_list(usual: Plan, tmp_path: Path) -> None:
    rules = op_list(
        tmp_path,
        """\
        deny: [{tanh: {devices: cpu}}]
        allow: [{softmax: {when: {dim: -1}}}]
        modules: [{path: fc2, category: float32}]
        """,
    )
    lists = ["default", rules]
    assert set(moved(usual, convert(op_list=lists).plan)) >= {"tanh", "softmax", "linear_1"}
    again = convert(usual, op_list=lists).plan
    assert [n.placement.run for n in again.nodes] == [n.placement.run for n in usual.nodes]
    assert {"tanh", "softmax", "linear_1"} <= {
        n.name for n in again.nodes if str(n.decision.source).startswith("plan:nodes[")
    }


def test_nodes_without_a_line_are_decided_as_usual(usual: Plan, tmp_path: Path) -> None:
    path = edited(usual, tmp_path, *placed("softmax", "low"), lines={"softmax"})
    # No longer behind a float32 softmax, what lies between it and the next linear may run low.
    assert {"softmax", "mul", "view", "add"} <= set(moved(usual, convert(path).plan))
    path.write_text('{"nodes": [{"name": "linear", "op": "linear", "placement": {"run": "float32"}}]}')
    assert {"linear", "tanh"} <= set(moved(usual, convert(path).plan))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str]] = {
    "no kernel": (lambda x: x.exp(), "exp", "cpu has no bfloat16 kernel"),
    "island": (lambda x: (x @ x).float().mul(2), "to", "the model's own cast to float32"),
    "dtype": (lambda x: x.softmax(-1, dtype=torch.float32), "softmax", "the call names dtype=float32"),
    "constant": (lambda x: x.sum() * 3.402e38, "mul", "other=3.402e+38 is beyond bfloat16's range"),
    "new": (lambda x: x + torch.zeros(8), "zeros", "makes float32 values from none"),
}


@unchecked
@pytest.mark.parametrize("name", REFUSED)
def test_lines_that_cannot_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, node, reason = REFUSED[name]
    facts = replace(load_kernel_facts(), no_kernel={("cpu", "bfloat16"): frozenset({"exp"})})
    monkeypatch.setattr(sys.modules["autocastfx.options"], "load_kernel_facts", lambda: facts)
    inputs = (torch.rand(8, 8),)
    plan = decided(function, *inputs, dtype=torch.bfloat16).plan
    path = edited(plan, tmp_path, *placed(node, "low"))
    with pytest.raises(PlanError) as caught:
        autocastfx.convert(Function(function), inputs, dtype=torch.bfloat16, plan=path)
    expected = (
        rf"{re.escape(str(path))}:\d+:\d+: node '{node}' \(\w+\) cannot run in 16 bits: {re.escape(reason)}\. Leave"
    )
    assert re.match(expected, str(caught.value)), caught.value
    assert caught.value.source is not None


def test_a_node_without_float32_values_has_no_precision_of_ours(tmp_path: Path) -> None:
    def both(x: torch.Tensor, i: torch.Tensor) -> Any:
        return x @ x, i + 1

    inputs = (torch.rand(8, 8), torch.arange(3))
    plan = decided(both, *inputs, dtype=torch.bfloat16).plan
    path = edited(plan, tmp_path, *placed("add", "low"))
    with pytest.raises(PlanError, match=r"node 'add' holds no float32 value, so it cannot run 'low'"):
        autocastfx.convert(Function(both), inputs, dtype=torch.bfloat16, plan=path)
    path = edited(plan, tmp_path, *placed("matmul", "captured"))
    with pytest.raises(PlanError, match=r"node 'matmul' runs 'low' or 'float32', so it cannot run 'captured'"):
        autocastfx.convert(Function(both), inputs, dtype=torch.bfloat16, plan=path)


def test_lines_that_speak_of_no_node_are_said_in_one_warning(usual: Plan, tmp_path: Path) -> None:
    path = edited(usual, tmp_path)
    text = path.read_text().replace('"name": "softmax"', '"name": "sofmax"').replace('"op": "tanh"', '"op": "tan"')
    path.write_text(text.replace('"module": "fc3"', '"module": "fc4"'))
    with pytest.warns(UnmatchedPlanWarning) as caught:
        plan = convert(path).plan
    assert [n.placement.run for n in plan.nodes] == [n.placement.run for n in usual.nodes]
    said = re.sub(rf"{re.escape(str(path))}(:\d+:\d+)?", "plan.json", str(caught[0].message))
    assert said == (
        "lines of the plan plan.json speak of no node of the model: plan.json: 'tanh' is tanh, not tan; plan.json: no "
        "node is named 'sofmax' (did you mean 'softmax'?); plan.json: 'linear_2' is in module 'fc3', not 'fc4'."
    )
    assert [w.filename for w in caught] == [__file__]


def test_what_a_plan_keeps_for_backward_is_told_where_no_rule_does(tmp_path: Path) -> None:
    model, x, path = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(64, 64), tmp_path / "p"
    options: dict[str, Any] = {"dtype": "bfloat16", "check": False}
    plan = autocastfx.convert(model, (x,), saved="recompute", **options).plan
    path.write_text(plan.to_json())
    for given in (plan, path):
        with pytest.warns(
            UnmatchedPlanWarning, match="says what is kept for backward, and here all is kept as computed"
        ):
            assert autocastfx.convert(model, (x,), plan=given, **options).plan.saved == ()
        assert autocastfx.convert(model, (x,), plan=given, saved="recompute", **options).plan.saved == plan.saved


def test_many_lines_that_speak_of_no_node_are_counted(usual: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"nodes": [{"name": f"n{i}", "op": "mul"} for i in range(25)]}))
    with pytest.warns(UnmatchedPlanWarning, match=r"no node is named 'n19'; and 5 more\.$"):
        assert convert(path).plan == usual


class Grown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ x.transpose(0, 1)).softmax(-1)
        return y * 2 if x.shape[0] > 3 else y


def test_a_plan_applies_to_both_modes_to_other_sizes_and_after_pickling(usual: Plan, tmp_path: Path) -> None:
    amp_model = convert(edited(usual, tmp_path, *placed("softmax", "low")))
    (tmp_path / "plan.json").unlink()  # it was read
    assert str(amp_model.plan["softmax"].placement.run) == "low"

    model = Grown().eval()
    plan = decided(model, torch.rand(2, 8), dtype=torch.bfloat16).plan
    path = edited(plan, tmp_path, *placed("softmax", "low"))
    amp_model = autocastfx.convert(model, (torch.rand(2, 8),), dtype=torch.bfloat16, plan=path)
    path.unlink()
    twin = pickle.loads(pickle.dumps(amp_model))
    twin(torch.rand(5, 8))
    assert str(twin.plan["softmax"].placement.run) == "low"
    amp_model(torch.rand(5, 8))
    assert len(amp_model.variants) == 2
    assert {str(v.plan["softmax"].placement.run) for v in amp_model.variants} == {"low"}


def test_nodes_of_subgraphs_have_lines(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = (x @ x).exp()
            return y @ x

    model, inputs = Net().eval(), (torch.rand(8, 8),)
    plan = autocastfx.convert(model, inputs, dtype=torch.bfloat16, check=False).plan
    (name,) = [n.name for n in plan.nodes if n.op == "exp"]
    assert "/" in name
    path = edited(plan, tmp_path, *placed(name, "low"))
    assert moved(plan, autocastfx.convert(model, inputs, dtype=torch.bfloat16, plan=path, check=False).plan) == {
        name: "low"
    }
