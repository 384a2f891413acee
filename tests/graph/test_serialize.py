"""A graph goes through plain data and comes back the same."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autocastfx
from autocastfx.graph.serialize import GraphData, data_of, graph_of
from tests.helpers import Function


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def sliced(x: Tensor) -> Tensor:
    return x[1:, None].sum(0) + torch.ops.aten.split.Tensor(x, 2)[0].sum()


def branched(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + torch.ones(3), lambda x: x.softmax(0), (x,))


@pytest.mark.parametrize("function", [sliced, branched])
def test_a_converted_graph_comes_back_with_its_origins(function: Any) -> None:
    graph = autocastfx.convert(Function(function), (torch.rand(3),), dtype="float16").graph
    data = pickle.loads(pickle.dumps(data_of(graph, {})))
    found = graph_of(data)
    found.lint()
    assert [n.format_node() for n in found.nodes] == [n.format_node() for n in graph.nodes]
    assert [n.meta.keys() for n in found.nodes] == [n.keys() for n in (node["meta"] for node in data)]
    assert all("val" not in node.meta for node in found.nodes)


def test_functions_of_autograd_and_what_is_read_elsewhere() -> None:
    graph = fx.Graph()
    held = graph.get_attr("held.weight")
    graph.output(graph.call_function(Doubled.apply, (held,)))
    found = graph_of(pickle.loads(pickle.dumps(data_of(graph, {"held.weight": "weight"}))))
    read, doubled, _ = found.nodes
    assert read.target == "weight"
    assert doubled.target == Doubled.apply


def test_sub_graphs_come_back_with_their_tensors_and_those_inside_them() -> None:
    inner = fx.symbolic_trace(torch.nn.Linear(2, 2))
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("inner"), x)))
    outer = fx.GraphModule({"inner": inner}, graph)
    made = pickle.loads(pickle.dumps(GraphData.of(outer))).module()
    rows = torch.rand(1, 2)
    assert made.inner(rows).equal(inner(rows))
    assert [n.format_node() for n in made.graph.nodes] == [n.format_node() for n in graph.nodes]
