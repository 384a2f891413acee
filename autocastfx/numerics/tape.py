"""Run a backward pass that stops between the nodes of a graph, so that gradients of its values can be read."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

__all__ = ["Backward", "Edge", "Tape"]

_now: Any = cast("Any", torch.autograd)._get_sequence_nr

Edge = tuple[Any, int]  # a function of torch's autograd, and the number of its output


@dataclass
class Tape:
    """Records autograd's functions for the values of a graph's nodes, by sequence numbers, which only grow.

    Attributes:
        starts, ends: the sequence numbers before and after a node ran.
        made: by node, an edge for each of its floating-point values; None for values that require no gradient or that
            it did not make itself.
        leaves: edges of the parameters and inputs that require gradients, by name.
        uses: the sequence number before the first node that reads a leaf; 0 for inputs.
    """

    starts: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    ends: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    made: dict[fx.Node, list[Edge | None]] = field(default_factory=dict[fx.Node, list["Edge | None"]])
    leaves: dict[str, Edge] = field(default_factory=dict[str, "Edge"])
    uses: dict[str, int] = field(default_factory=dict[str, int])

    def leaf(self, name: str, leaf: torch.Tensor) -> None:
        """Record a leaf under the name of a ``get_attr`` target or an input."""
        self.leaves[name] = edge_of(leaf)
        self.uses.setdefault(name, 0)

    def start(self, node: fx.Node) -> None:
        """Record the start of ``node``."""
        self.starts[node] = now = _now()
        name = str(node.target)
        if node.op == "get_attr" and name in self.leaves and not self.uses[name]:
            self.uses[name] = now

    def end(self, node: fx.Node, value: Any) -> None:
        """Record the end of ``node`` and its ``value``. Values passed on belong to the node that made them."""
        found: list[Edge | None] = []
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                edge = edge_of(tensor) if tensor.requires_grad else None
                is_own = edge is not None and not _is_leaf(edge[0]) and edge[0]._sequence_nr() >= self.starts[node]
                found.append(edge if is_own else None)
        if any(edge is not None for edge in found):
            self.made[node] = found
        self.ends[node] = _now()

    def keep(self, nodes: Iterable[fx.Node]) -> None:
        """Forget the values of other nodes, whose edges would keep tensors saved for backward alive."""
        self.made = {node: self.made[node] for node in nodes if node in self.made}


def edge_of(tensor: torch.Tensor) -> Edge:
    """Return a tensor's edge in the present autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class Backward:
    """Runs backwards from one number with a given gradient, step by step.

    Functions run in the order of torch's own engine, latest first, and gradients are added up in the same order. Only
    gradients that functions still need are kept, and those of leaves.
    """

    def __init__(self, output: torch.Tensor, gradient: torch.Tensor) -> None:
        self._waiting: dict[Any, list[torch.Tensor | None]] = {}
        self._order: list[tuple[int, int, Any]] = []
        self._owners: dict[Any, list[Any]] = {}  # owners that keep functions written in Python alive
        self._given = 0
        self.at: float = float("inf")
        self._add(edge_of(output), gradient, get_gradient_edge(output).ownership_token)

    @property
    def pending(self) -> int:
        """The number of gradients kept now."""
        return sum(gradient is not None for found in self._waiting.values() for gradient in found)

    def run_to(self, mark: int) -> None:
        """Run all functions with sequence numbers from ``mark`` on."""
        self.at = min(self.at, mark)
        while self._order and -self._order[0][0] >= mark:
            function = heapq.heappop(self._order)[2]
            owner = function, self._owners.pop(function, None)
            for edge, gradient in _apply(function, self._waiting.pop(function)):
                self._add(edge, gradient, owner)

    def gradient(self, edge: Edge) -> torch.Tensor | None:
        """Return the gradient of a value, or None. It is complete once the functions of all its readers have run."""
        found = self._waiting.get(edge[0])
        return found[edge[1]] if found is not None else None

    def forget(self, edge: Edge) -> None:
        """Drop the gradient of a leaf."""
        self._waiting.pop(edge[0], None)

    def _add(self, edge: Edge, gradient: torch.Tensor, owner: Any) -> None:
        function, output = edge
        kinds = function._input_metadata
        if isinstance(function, torch._C._FunctionBase):
            self._owners.setdefault(function, []).append(owner)
        if function not in self._waiting:
            self._waiting[function] = [None] * len(kinds)
            if not _is_leaf(function):
                self._given += 1
                heapq.heappush(self._order, (-function._sequence_nr(), self._given, function))
        held = self._waiting[function]
        fitting, before = _fitting(gradient, kinds[output]), held[output]
        held[output] = fitting if before is None else before + fitting


def _is_leaf(function: Any) -> bool:
    return hasattr(function, "variable")


def _fitting(gradient: torch.Tensor, kind: Any) -> torch.Tensor:
    """Convert ``gradient`` to the shape and dtype of its value, as torch's own engine does."""
    if gradient.shape != kind.shape:
        gradient = gradient.sum_to_size(kind.shape)
    if gradient.is_complex() and not kind.dtype.is_complex:
        gradient = torch.real(gradient)
    return gradient.to(device=kind.device, dtype=kind.dtype)


def _apply(function: Any, gradients: Sequence[torch.Tensor | None]) -> list[tuple[Edge, torch.Tensor]]:
    """Run ``function`` and return its results with the edges of its inputs."""
    edges: list[Edge] = list(function.next_functions)
    if callable(function):
        results = function(*gradients)
        results = results if isinstance(results, tuple) else (results,)
    else:  # of a torch.autograd.Function, in Python: one result for each argument, tensor or not
        kinds = function._input_metadata
        full = [
            torch.zeros(kind.shape, dtype=kind.dtype, device=kind.device) if given is None else given
            for given, kind in zip(gradients, kinds, strict=True)
        ]
        given = function.apply(*full)
        given = given if isinstance(given, tuple) else (given,)
        results = [result for result, needed in zip(given, function.needs_input_grad, strict=False) if needed]
        edges = [edge for edge in edges if edge[0] is not None]
    pairs = zip(edges, results, strict=True)
    return [(edge, found) for edge, found in pairs if edge[0] is not None and found is not None]
