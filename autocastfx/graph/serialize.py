"""Turn graphs into plain data that pickles, and back: targets and nodes by name, without abstract values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_aggregate, map_arg

from autocastfx.graph.node import attributes_of, kept_meta


class GraphData:
    """A sub-graph, and the sub-graphs inside it, as plain data."""

    def __init__(self, nodes: list[dict[str, Any]], attributes: dict[str, Any]) -> None:
        self.nodes, self.attributes = nodes, attributes

    @classmethod
    def of(cls, module: fx.GraphModule) -> GraphData:
        """Turn the graph of ``module``, and the tensors and sub-graphs that it reads, into data."""
        attributes = attributes_of(module, module.graph)
        inner = {t: cls.of(a) if isinstance(a, fx.GraphModule) else a for t, a in attributes.items()}
        return cls(data_of(module.graph, {}), inner)

    def module(self) -> fx.GraphModule:
        """Rebuild the module."""
        attributes = {t: a.module() if isinstance(a, GraphData) else a for t, a in self.attributes.items()}
        return fx.GraphModule(attributes, graph_of(self.nodes))


class _Ref(str):
    """The name of a node, in place of the node."""


def data_of(graph: fx.Graph, places: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a dictionary for each node of ``graph``; ``places`` renames the targets of ``get_attr`` nodes."""
    return [
        {
            "op": node.op,
            "name": node.name,
            "target": places.get(str(node.target), _target(node.target))
            if node.op == "get_attr"
            else _target(node.target),
            "args": map_arg(node.args, lambda n: _Ref(n.name)),
            "kwargs": map_arg(node.kwargs, lambda n: _Ref(n.name)),
            "meta": kept_meta(node),
        }
        for node in graph.nodes
    ]


def _target(target: Any) -> Any:
    if isinstance(target, OpOverload):
        return ("op", target.namespace, target._schema.name.partition("::")[2], target._overloadname)
    if isinstance(target, HigherOrderOperator):
        return ("higher_order", target.name())
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type):  # autograd.Function.apply
        return ("method", owner, target.__name__)
    return target


def graph_of(nodes: list[dict[str, Any]]) -> fx.Graph:
    """Rebuild the graph from the data that ``data_of`` returned."""
    graph, made = fx.Graph(), dict[str, fx.Node]()

    def real(leaf: Any) -> Any:
        return made[leaf] if isinstance(leaf, _Ref) else leaf

    for data in nodes:
        args, kwargs = map_aggregate((data["args"], data["kwargs"]), real)  # looks into slices too
        node = graph.create_node(data["op"], _resolve(data["target"]), tuple(args), dict(kwargs), name=data["name"])
        node.meta.update(data["meta"])
        made[data["name"]] = node
    return graph


def _resolve(target: Any) -> Any:
    if not isinstance(target, tuple):
        return target
    if target[0] == "op":
        return getattr(getattr(getattr(torch.ops, target[1]), target[2]), target[3])
    if target[0] == "higher_order":
        return getattr(torch.ops.higher_order, target[1])
    return getattr(target[1], target[2])
