"""The op list that changes how a node runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import autocastfx
from autocastfx import AmpModule, OpList
from autocastfx.plan.plan import Precision
from autocastfx.plan.proposed_list import proposed_list
from autocastfx.report.dump import view_of
from autocastfx.report.reason import Reasons
from tests.golden.models import converted


def test_ops_at_the_root_are_named_by_op_and_others_by_module() -> None:
    plan = converted("encoder_layer").plan
    nodes = [plan[name] for name in ("softmax", "matmul", "linear_2", "gelu", "linear")]
    assert proposed_list(nodes, "float32") == (
        "deny: [softmax, matmul]\n"
        "modules:\n"
        '  - {path: "mlp.0", category: float32, ops: [linear]}\n'
        '  - {path: "mlp.1", category: float32, ops: [gelu]}\n'
        '  - {path: "qkv", category: float32, ops: [linear]}\n'
    )
    assert proposed_list(nodes[:1], "low") == "allow: [softmax]\n"
    assert proposed_list([], "low") == ""


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "linear", "gelu", "linear_3"])
def test_the_list_of_a_reason_turns_its_node_around(name: str, tmp_path: Path) -> None:
    view = view_of(converted("encoder_layer"))
    offered = Reasons(view.rows).of(view.plan[name]).op_list
    path = tmp_path / "mine.yaml"
    path.write_text(offered, encoding="utf-8")
    original = converted("encoder_layer")._original
    assert original.model is not None
    inputs = torch.randn(2, 9, 16), torch.zeros(2, 1, 9, 9)
    again = autocastfx.convert(original.model, inputs, op_list=["default", str(path)], check=False)
    assert again.plan[name].placement.run is not view.plan[name].placement.run


def test_what_no_list_decides_has_none() -> None:
    view = view_of(converted("no_grad"))
    reasons = Reasons(view.rows)
    assert [reasons.of(view.plan[name]).op_list for name in ("to", "clone", "getitem_4")] == ["", "", ""]


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


class ExpTwice(nn.Module):
    """One at the root, which overflows in float16, and one in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), Exp()

    def forward(self, x: Tensor) -> Tensor:
        return torch.div(torch.exp(self.linear(x) * 1e-3 + x), 2) + self.inner(x * 0.5)


EXP_TWICE = f"{ExpTwice.__module__}.ExpTwice"
LOWERING: dict[str, dict[str, Any]] = {
    "op": {"allow": ["exp"]},
    "op on a device": {"allow": [{"exp": {"devices": "cpu"}}]},
    "class": {"allow": [EXP_TWICE, "exp"]},
    "glob": {"modules": [{"path": "**", "ops": ["exp"], "category": "low"}]},
    "glob on a device": {"modules": [{"path": "**", "ops": ["exp"], "category": "low", "devices": "cpu"}]},
    "glob for all ops": {"modules": [{"path": "**", "category": "low"}]},
    "expression": {"modules": [{"path": "re:.*", "ops": ["exp"], "category": "low"}]},
    "conditions": {"allow": ["exp", {"div": {"when": {"other": 2}}}]},
}
lowering = pytest.mark.parametrize("data", LOWERING.values(), ids=LOWERING.keys())
LARGE = torch.full((4, 8), 12.0)


def lowered(*more: OpList, data: dict[str, Any]) -> AmpModule:
    torch.manual_seed(0)
    lists = ["default", OpList.of(data), *more]
    return autocastfx.convert(ExpTwice(), LARGE, op_list=lists, dtype="float16", check=False)


@lowering
def test_what_an_overflow_proposes_wins_over_the_rule_that_made_it(data: dict[str, Any]) -> None:
    found = autocastfx.find_overflow(lowered(data=data), LARGE)
    assert found
    assert found.op == "exp"
    mended = lowered(OpList.of(yaml.safe_load(found.fix)), data=data)
    assert not autocastfx.find_overflow(mended, LARGE)
    assert mended(LARGE).isfinite().all()


@lowering
def test_what_bisection_finds_wins_over_the_rule_that_made_it(data: dict[str, Any]) -> None:
    def metric(amp_model: AmpModule) -> float:
        return float(not amp_model(LARGE).isfinite().all())

    torch.manual_seed(0)
    lists = ["default", OpList.of(data)]
    found = autocastfx.bisect(ExpTwice(), LARGE, metric=metric, tolerance=0.5, op_list=lists, dtype="float16")
    assert metric(lowered(found.op_list, data=data)) == 0.0


@lowering
def test_the_rule_that_a_reason_advises_turns_its_node_around(data: dict[str, Any]) -> None:
    amp_model = lowered(data=data)
    reasons = Reasons(view_of(amp_model).rows)
    of_exp = [node for node in amp_model.plan.nodes if node.op == "exp"]
    assert len(of_exp) == 2
    for node in of_exp:
        assert node.placement.run is Precision.LOW
        advice = reasons.of(node).change
        by_module, by_op = (
            re.search(r"under modules the rule (\{.*?\})", advice),
            re.search(r"(\w+) under deny", advice),
        )
        for found, data_of in ((by_module, lambda text: {"modules": [yaml.safe_load(text)]}), (by_op, _denied)):
            if found:
                again = lowered(OpList.of(data_of(found[1])), data=data)
                assert again.plan[node.name].placement.run is Precision.FLOAT32
        assert by_module or by_op


def test_where_a_plan_was_given_its_lines_are_named(tmp_path: Path) -> None:
    edited = tmp_path / "plan.json"

    def planned(run: str, *names: str) -> AmpModule:
        data = json.loads(edited.read_text(encoding="utf-8"))
        for node in (node for node in data["nodes"] if node["name"] in names):
            node["placement"]["run"] = node["placement"]["store"] = run
        edited.write_text(json.dumps(data, indent=1), encoding="utf-8")
        torch.manual_seed(0)
        return autocastfx.convert(ExpTwice(), LARGE, dtype="float16", plan=edited, check=False)

    edited.write_text(lowered(data={}).plan.to_json(), encoding="utf-8")
    amp_model = planned("low", "exp", "exp_1", "div", "add_1")
    found = autocastfx.find_overflow(amp_model, LARGE)
    assert found
    assert (found.name, found.fix, found.no_list_helps) == ("exp", "", ())
    lines = dict(reversed(one) for one in re.findall(r"(plan\.json:\d+:\d+) \((\w+)\)", found.advice))
    assert "exp" in lines
    reason = Reasons(view_of(amp_model).rows).of(amp_model.plan["exp"])
    assert reason.change.endswith(f"{lines['exp']}, in the plan given to convert")
    assert reason.op_list == ""
    mended = planned("float32", *lines)
    assert not autocastfx.find_overflow(mended, LARGE)
    with pytest.raises(ValueError, match="leave plan out"):
        autocastfx.bisect(ExpTwice(), LARGE, metric=lambda _: 1.0, tolerance=0.5, dtype="float16", plan=edited)


def _denied(op: str) -> dict[str, Any]:
    return {"deny": [op]}
