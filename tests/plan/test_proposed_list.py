"""The op list that changes how a node runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autocastfx
from autocastfx.plan.plan import proposed_list
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
    again = autocastfx.convert(original.model, inputs, op_list=["default", str(path)])
    assert again.plan[name].placement.run is not view.plan[name].placement.run


def test_what_no_list_decides_has_none() -> None:
    view = view_of(converted("no_grad"))
    reasons = Reasons(view.rows)
    assert [reasons.of(view.plan[name]).op_list for name in ("to", "clone", "getitem_4")] == ["", "", ""]
