"""Write the shapes of a graph's values, and count their bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from autocastfx.graph.node import attributes_of, example, example_size, subgraphs, tensors
from autocastfx.plan.plan import Plan

__all__ = ["Shapes", "bytes_of", "captured_values"]

Values = tuple[torch.Tensor, ...]
_SYMBOL = re.compile(r"\b([a-z]+)\d+\b")
_AROUND = re.compile(r"^\(([^()]*)\)$")
_LONGEST = 20  # of an expression; a longer one says less than its value


class Shapes:
    """Writes the shapes of the values of one graph.

    A size that may differ from call to call is a symbol with its size in the example inputs: ``[s0=8, 32]``. Symbols
    are numbered in the order in which they come, so that they are the same with every version of torch. The verified
    graph holds sizes of the example inputs alone; symbols come from the values of the captured graph.
    """

    def __init__(self, plan: Plan, captured: Mapping[str, Values]) -> None:
        self._captured = captured
        self._behind = {made.node: made.replaced for made in plan.recomposed}
        self._behind |= {cast.name: (cast.value,) for cast in plan.casts}
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def of(self, name: str, values: Values) -> str:
        """Write ``[s0=8, 32] x 2, [4]`` for a node that gives three tensors; an empty text for none."""
        shapes = (self._shape(value.shape) for value in self._symbolic(name, values))
        runs = [(shape, len(list(same))) for shape, same in groupby(shapes)]
        return ", ".join(shape if count == 1 else f"{shape} x {count}" for shape, count in runs)

    def _symbolic(self, name: str, values: Values) -> Values:
        """The captured values of the node, or of what it stands for, if they have its sizes; else its own values."""
        sizes = _sizes(values)
        for known in (name, *reversed(self._behind.get(name, ()))):
            if known in self._captured and _sizes(self._captured[known]) == sizes:
                return self._captured[known]
        return values

    def _shape(self, sizes: Sequence[Any]) -> str:
        return f"[{', '.join(self._size(size) for size in sizes)}]"

    def _size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
            return str(int(size))
        said, known = _SYMBOL.sub(self._name, str(size.node.expr)), example(size)
        said = _AROUND.sub(r"\1", said) if len(said) <= _LONGEST else "…"
        return said if known is None else f"{said}={known}"

    def _name(self, found: re.Match[str]) -> str:
        letter = found[1]
        if found[0] not in self._names:
            self._names[found[0]] = f"{letter}{self._counts.get(letter, 0)}"
            self._counts[letter] = self._counts.get(letter, 0) + 1
        return self._names[found[0]]


def captured_values(graph: fx.Graph, attributes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Values]]:
    """Yield the abstract tensors of each node of a captured graph and its sub-graphs, by the node's name in a plan.

    ``attributes`` holds the sub-graphs by the targets of the ``get_attr`` nodes that read them.
    """
    for node in graph.nodes:
        yield prefix + node.name, tensors(node)
        for target, part in subgraphs(node, attributes).items():
            yield from captured_values(part.graph, attributes_of(part, part.graph), f"{prefix}{target}/")


def bytes_of(values: Iterable[torch.Tensor]) -> int:
    """Count the bytes of all elements, for the sizes of the example inputs. A size that depends on data counts as 1."""
    return sum(math.prod(example_size(size) for size in value.shape) * value.element_size() for value in values)


def _sizes(values: Values) -> list[list[Any]]:
    return [[example_size(size) for size in value.shape] for value in values]
