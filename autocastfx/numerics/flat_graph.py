"""Flatten a graph: sub-graphs that always run exactly once are inlined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import map_arg

from autocastfx.graph.names import op_name
from autocastfx.graph.node import attribute

Region = Callable[[], AbstractContextManager[Any]]
_Read = Callable[[str], Any]


@dataclass(frozen=True)
class FlatGraph:
    """A flattened copy of a graph.

    Attributes:
        names: names of its nodes as in a plan: ``subgraph/name`` for nodes of a sub-graph.
        regions: the modes that nodes of inlined sub-graphs run in, outermost first.
        held: values of ``get_attr`` nodes, by target; of generators of random numbers copies.
        ops: names of ops as in a plan, for nodes that got others.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    names: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    regions: dict[fx.Node, tuple[Region, ...]] = field(default_factory=dict[fx.Node, tuple[Region, ...]])
    held: dict[str, Any] = field(default_factory=dict[str, Any])
    ops: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of the nodes that still have sub-graphs, which may run not at all or several times."""
        return tuple(self.names[n] for n in self.graph.nodes if isinstance(n.target, HigherOrderOperator))


def flatten(graph: fx.Graph, read: _Read) -> FlatGraph:
    """Inline the ``no_grad`` and ``torch.autocast`` regions of ``graph``, captured or converted, in a copy.

    ``read`` returns the value of a ``get_attr`` node, by target.
    """
    flat = FlatGraph()
    flat.graph.output(_Writer(flat, read, "", ()).write(graph))
    return flat


@dataclass(frozen=True)
class _Writer:
    """Appends the nodes of a graph to a flat one."""

    flat: FlatGraph
    read: _Read
    prefix: str
    around: tuple[Region, ...]

    def write(self, graph: fx.Graph, inputs: Sequence[Any] | None = None) -> Any:
        """Append the nodes of ``graph``, whose placeholders become ``inputs`` if given; return its output."""
        made: dict[fx.Node, Any] = {}
        given = iter(inputs or ())
        for node in graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], made.__getitem__)
            if node.op == "placeholder" and inputs is not None:
                made[node] = next(given)
            elif (kind := _kind(node)) is not None:
                made[node] = self._inside(node, kind, made)
            elif _is_member(node, made):
                made[node] = made[cast("fx.Node", node.args[0])][cast("int", node.args[1])]
            elif not _is_holder(node):
                made[node] = self._copy(node, made)
        return None

    def _inside(self, node: fx.Node, kind: _Kind, made: Mapping[fx.Node, Any]) -> Any:
        before, mode = kind
        holder, *operands = node.args[before:]
        target = str(cast("fx.Node", holder).target)
        module = self.read(target)
        enclosing = (*self.around, partial(mode, *node.args[:before]))
        inner = _Writer(self.flat, partial(attribute, module), f"{self.prefix}{target.rpartition('.')[2]}/", enclosing)
        return inner.write(module.graph, [map_arg(operand, made.__getitem__) for operand in operands])

    def _copy(self, node: fx.Node, made: Mapping[fx.Node, Any]) -> fx.Node:
        copied = self.flat.graph.node_copy(node, made.__getitem__)
        if node.op == "get_attr":
            copied.target = f"{self.prefix}{node.target}"
            value = self.read(str(node.target))
            self.flat.held[copied.target] = value.clone_state() if isinstance(value, torch.Generator) else value
        self.flat.names[copied] = f"{self.prefix}{node.name}"
        if self.around:
            self.flat.regions[copied] = self.around
        return copied


# A higher-order operator that runs its graph once: the number of arguments before the graph, and the mode.
_Kind = tuple[int, Callable[..., AbstractContextManager[Any]]]
# The arguments of an autocast region are those of torch.autocast, in its order.
_KINDS: dict[str, _Kind] = {
    "wrap_with_set_grad_enabled": (1, torch.set_grad_enabled),
    "wrap_with_autocast": (4, torch.autocast),
}


def _kind(node: fx.Node) -> _Kind | None:
    return _KINDS.get(op_name(node)) if isinstance(node.target, HigherOrderOperator) else None


def _is_member(node: fx.Node, made: Mapping[fx.Node, Any]) -> bool:
    """True if ``node`` takes a member out of an inlined sub-graph's output."""
    if node.op != "call_function" or op_name(node) != "getitem" or not isinstance(node.args[0], fx.Node):
        return False
    return isinstance(made[node.args[0]], (tuple, list))


def _is_holder(node: fx.Node) -> bool:
    """True if ``node`` reads the graph of an inlined region."""
    users = [(user, _kind(user)) for user in node.users]
    return any(kind is not None and user.args[kind[0]] is node for user, kind in users)
