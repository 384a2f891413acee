"""Which nodes run code that a graph does not show."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autocastfx.capture.kept_whole import AutogradCall
from autocastfx.graph.alias import is_opaque
from autocastfx.runtime.operators.casts import saturating_cast
from autocastfx.runtime.working_copies import working_copy


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


def mine(x: Tensor) -> Tensor:
    return x


SHOWN = [torch.ops.aten.relu.default, saturating_cast, torch.relu, torch._C._nn.linear, nn.functional.gelu]
SHOWN += [operator.getitem, math.floor, torch.sym_max, working_copy, torch.Tensor.view, torch.ops.higher_order.cond]
HIDDEN = [mine, Straight.apply, AutogradCall(Straight)]


@pytest.mark.parametrize(("targets", "expected"), [(SHOWN, False), (HIDDEN, True)])
def test_functions(targets: list[Any], expected: bool) -> None:
    nodes = [fx.Graph().create_node("call_function", target) for target in targets]
    assert [is_opaque(node) for node in nodes] == [expected] * len(nodes)


def test_a_custom_operator_is_whatever_its_schema_says() -> None:
    library = torch.library.Library("autocastfx_opaque", "DEF")
    library.define("f(Tensor x) -> Tensor")
    assert is_opaque(fx.Graph().create_node("call_function", torch.ops.autocastfx_opaque.f.default))


def test_modules_methods_and_attributes() -> None:
    graph = fx.Graph()
    made = {op: graph.create_node(op, "m") for op in ("placeholder", "get_attr", "call_method", "call_module")}
    assert [op for op, node in made.items() if is_opaque(node)] == ["call_module"]
