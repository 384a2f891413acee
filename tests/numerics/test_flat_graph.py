"""What regions run is written out in their places, in their modes, and gives what the model gives."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch import Tensor, nn

from autocastfx import OpList, compare, convert, find_overflow
from autocastfx.graph.node import attribute
from autocastfx.numerics.flat_graph import flatten
from tests.helpers import Net, relative_error


class Regions(nn.Module):
    """Without gradients, with them again inside, and of torch.autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.exp(self.first(x) * 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.second(y)
        return self.first(z.float()) + y


def branches() -> nn.Module:
    return Net(lambda m, x: torch.cond(x.sum() > 0, lambda x: x.exp() * 100, lambda x: x * 2, (x * 1.0,)) + 1)


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def test_nodes_are_named_as_in_the_plan_and_run_in_their_modes() -> None:
    torch.manual_seed(0)
    amp_model = convert(Regions(), (X,), dtype="float16")
    flat = flatten(amp_model.graph, lambda name: attribute(amp_model, name))
    named = {name: node for node, name in flat.names.items()}
    planned = {node.name for node in amp_model.plan.nodes if node.op in ("linear", "exp", "add")}
    inside = {name for name in planned if "/" in name}
    assert len(inside) == 2
    assert inside <= set(named)
    for name in inside:
        with flat.regions[named[name]][0]():
            assert not torch.is_grad_enabled()
    in_autocast = [node for node, name in flat.names.items() if "/" in name and name not in planned]
    assert any(node.name.startswith("linear") for node in in_autocast)
    assert flat.whole == ()
    flat.graph.lint()


def test_they_are_compared_and_have_gradients_where_the_model_has() -> None:
    torch.manual_seed(0)
    model = Regions()
    amp_model = convert(model, (X,), dtype="float16")
    found = compare(None, amp_model, X, gradients=True)
    by_op = {node.name.rpartition("/")[2]: node for node in found.nodes}
    eps = torch.finfo(torch.float16).eps
    assert [node.op for node in found.nodes if "/" in node.name] == ["linear", "mul", "exp", "linear"]
    assert all(0 < by_op[name].error < 8 * eps for name in ("linear", "mul", "exp"))
    assert by_op["linear"].gradient is None, "there are no gradients in that region"
    assert by_op["linear_1"].gradient is not None
    assert by_op["linear_1"].dtype == "bfloat16", "the region's own policy holds"
    assert {p.name for p in found.parameters} == {"first.weight", "first.bias", "second.weight", "second.bias"}
    with torch.no_grad():
        expected, result = model(X), amp_model(X)
    assert found.nodes[-1].error == pytest.approx(relative_error(result, expected), rel=1e-9)


def test_an_overflow_in_a_region_is_named_and_its_rule_mends_it() -> None:
    torch.manual_seed(0)
    model, x = Regions(), X * 30
    faulty = OpList.of({"modules": [{"path": "**", "ops": ["exp"], "category": "low"}]})
    found = find_overflow(convert(model, (x,), op_list=["default", faulty], dtype="float16"), x)
    assert found is not None
    assert (found.name.rpartition("/")[2], found.op, found.dtype) == ("exp", "exp", "float16")
    assert "/" in found.name
    assert "y = torch.exp(self.first(x) * 2)" in found.line
    mended = convert(model, (x,), op_list=["default", faulty, OpList.of(yaml.safe_load(found.fix))], dtype="float16")
    assert find_overflow(mended, x) is None
    assert mended(x).isfinite().all()


def test_branches_stay_whole_and_the_reports_say_so() -> None:
    x = X + 1
    amp_model = convert(branches(), (x,), dtype="float16")
    found = compare(None, amp_model, x)
    assert len(found.whole) == 1
    assert found.table().endswith(f"; not looked into: {found.whole[0]}")
    large = torch.full((4, 8), 60.0)
    overflow = find_overflow(convert(branches(), (large,), dtype="float16"), large * 2)
    assert overflow is not None
    assert overflow.advice.startswith("it holds sub-graphs, which are not looked into")
