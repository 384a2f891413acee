"""Random graphs of every category, drawn by hypothesis: what the placement is checked on against brute force."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autocastfx.graph.node import value
from autocastfx.plan.plan import NO_SOURCE, Decision
from autocastfx.policy.rule import Category

aten = torch.ops.aten
UNARY = {
    "deny": aten.exp.default,
    "fold": aten.softplus.default,
    "rounding fold": aten.log_sigmoid.default,
    "infer": aten.tanh.default,
    "clear": aten.relu.default,
    "keep": aten.sinh.default,
}
KINDS = (*UNARY, *["allow"] * 4, *["fold", "infer", "sum"] * 2, "in place", "view", "promote", "join", "split", "scale")
CATEGORIES = {
    aten.linear.default: Category.ALLOW,
    aten.exp.default: Category.DENY,
    aten.softplus.default: Category.DENY,
    aten.log_sigmoid.default: Category.DENY,
    aten.tanh.default: Category.INFER,
    aten.add.Tensor: Category.INFER,
    aten.add_.Tensor: Category.INFER,
    aten.mul.Tensor: Category.INFER,
    aten.relu.default: Category.CLEAR,
    aten.view.default: Category.CLEAR,
    aten.split.Tensor: Category.CLEAR,
    operator.getitem: Category.CLEAR,
    aten.cat.default: Category.PROMOTE,
    aten.fmod.Tensor: Category.PROMOTE,
    aten.sinh.default: Category.KEEP,
}

near = st.one_of(st.integers(0, 1), st.integers(0, 9))
steps = st.lists(st.tuples(st.sampled_from(KINDS), near, near), min_size=3, max_size=8)
outputs = st.lists(near, min_size=1, max_size=3)


def build(steps: list[tuple[str, int, int]], outputs: list[int]) -> tuple[fx.Graph, dict[fx.Node, Decision]]:
    """A graph of ``steps``, each a kind and the places of what it reads, counted from the newest value back."""
    mode, graph = FakeTensorMode(), fx.Graph()
    values: list[fx.Node] = []

    def made(node: fx.Node, abstract: Any) -> fx.Node:
        node.meta["val"] = abstract
        return node

    def call(target: Callable[..., Any], *args: Any) -> fx.Node:
        concrete = fx.node.map_arg(args, value)
        with mode:
            return made(graph.call_function(target, args), target(*concrete))

    def read(place: int) -> fx.Node:
        return values[-1 - place % len(values)]

    with mode:
        weight = made(graph.get_attr("weight"), torch.empty(8, 8))
        scale = made(graph.get_attr("scale"), torch.empty(8))
        values += [weight, *(made(graph.placeholder(name), torch.empty(4, 8)) for name in ("x", "y"))]
    for kind, first, second in steps:
        a, b = read(first), read(second)
        rows, same = value(a).shape[0], b if value(a).shape == value(b).shape else a
        if kind == "allow":
            values.append(call(aten.linear.default, a, weight))
        elif kind == "sum":
            values.append(call(aten.add.Tensor, a, same))
        elif kind == "scale":
            values.append(call(aten.mul.Tensor, a, scale))
        elif kind == "in place":
            values.append(call(aten.add_.Tensor, a, same))
        elif kind == "view":
            values.append(call(aten.view.default, a, [rows, 8]))
        elif kind == "promote":
            values.append(call(aten.fmod.Tensor, a, same))
        elif kind == "join":
            values.append(call(aten.cat.default, [a, b]))
        elif kind == "split" and rows > 1:
            halves = call(aten.split.Tensor, a, rows // 2)
            values += [call(operator.getitem, halves, i) for i in range(2)]
        else:
            values.append(call(UNARY.get(kind, aten.relu.default), a))
    graph.output(tuple(read(place) for place in outputs)).meta["val"] = None
    decisions = {
        node: Decision(CATEGORIES[node.target], "", NO_SOURCE) for node in graph.nodes if node.op == "call_function"
    }
    return graph, decisions


def reordered(
    graph: fx.Graph, decisions: dict[fx.Node, Decision], order: Random
) -> tuple[fx.Graph, dict[fx.Node, Decision]]:
    """The same nodes in another order that respects what they read."""
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    waiting = [node for node in graph.nodes if node.op != "output"]
    while waiting:
        node = order.choice([n for n in waiting if all(read in made for read in n.all_input_nodes)])
        made[node] = copy.node_copy(node, made.__getitem__)
        waiting.remove(node)
    output = graph.output_node()
    copy.output(fx.node.map_arg(output.args[0], made.__getitem__)).meta["val"] = None
    return copy, {made[n]: decisions[n] for n in decisions}
