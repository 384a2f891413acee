"""In-place ops take their own results where nobody sees the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autocastfx
from autocastfx.graph.names import op_name
from autocastfx.numerics.flat_graph import FlatGraph, flatten
from autocastfx.numerics.node_effects import write_out_of_place
from tests.helpers import Function

X = torch.linspace(-2, 2, 12).view(3, 4)


def flat(function: Callable[[Tensor], Tensor]) -> FlatGraph:
    captured = autocastfx.convert(Function(function), (X,), dtype="bfloat16").variants[0].captured
    assert captured is not None
    return flatten(captured.graph, captured.attributes.__getitem__)


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x: x.sin().relu_(), {"relu_": "relu"}),
        (lambda x: x.sin().add_(x).clamp_(0, 1), {"add_": "add", "clamp_": "clamp"}),
        (lambda x: x.sin().view(-1).mul_(2).view(3, 4) + 1, {"mul_": "mul"}),
    ],
)
def test_a_write_that_nobody_sees(function: Callable[[Tensor], Tensor], ops: dict[str, str]) -> None:
    graph = flat(function)
    write_out_of_place(graph)
    assert {name: op_name(node) for node, name in graph.ops.items()} == ops
    module = torch.fx.GraphModule({}, graph.graph)
    assert torch.equal(module(X)[0], function(X))


def read_later(x: Tensor) -> Tensor:
    hidden = x.sin()
    hidden[:, 0].mul_(2)
    return hidden + 1


def returned(x: Tensor) -> Tensor:
    hidden = x.sin()
    hidden.relu_()
    return hidden.view(-1)[:4]


@pytest.mark.parametrize(
    "function",
    [
        read_later,
        lambda x: x.relu_(),  # the caller's
        lambda x: x.sin().mul_(torch.ones(3, 4, dtype=torch.float64)),  # which would give float64
    ],
)
def test_a_write_that_shows(function: Callable[[Tensor], Tensor]) -> None:
    graph = flat(function)
    before = [node.target for node in graph.graph.nodes]
    write_out_of_place(graph)
    assert [node.target for node in graph.graph.nodes] == before
    assert graph.ops == {}


def test_what_was_written_may_be_read_by_its_old_name() -> None:
    graph = flat(returned)
    write_out_of_place(graph)
    module = torch.fx.GraphModule({}, graph.graph)
    assert torch.equal(module(X)[0], returned(X))
