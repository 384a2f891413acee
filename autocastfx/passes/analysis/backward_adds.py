"""How many gradients are added up into one element in backward, by an op's own kernel and by the readers of a value.

Some ops only move values forwards, and add gradients up backwards: an element that an index picks often, that several
windows cover, or that a border repeats gets as many gradients. A value that many ops read gets one from each. Added up
in 16 bits, one after the other, many like numbers stop growing: 256 + 1 is 256 in bfloat16. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autocastfx.graph.node import argument, dtypes, elements, is_member, number, tensors, uses
from autocastfx.graph.sizes import Size
from autocastfx.policy.rule import DepthLimit

# An op's own kernel.


def contributions(node: fx.Node, kind: str, size: Size) -> Any:
    """Return the most gradients that meet in one element of the first value that ``node`` reads.

    Infinite where it depends on data: where the size of the result does.

    Args:
        node: a node with an abstract value.
        kind: a key of ``contributions`` in kernel_facts.yaml.
        size: maps a size, which may be symbolic, to a number, or to itself.
    """

    def shape(value: fx.Node) -> Sequence[Any]:
        return [math.inf if (n := size(each)) is None else n for each in tensors(value)[0].shape]

    return _KINDS[kind](node, shape)


Shape = Callable[[fx.Node], Sequence[Any]]  # the sizes of a value


def _read(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _numbers(node: fx.Node, *names: str) -> list[Any]:
    """The number or numbers given for the first of these arguments that is given."""
    given = next((each for name in names if (each := argument(node, name)) not in (None, [], ())), ())
    return [number(each) for each in given] if isinstance(given, (list, tuple)) else [number(given)]


def _indexed(node: fx.Node, shape: Shape) -> Any:
    """In the worst case all indices are equal."""
    if (dim := number(argument(node, "dim"))) is not None:
        return shape(node)[dim]
    indices = [u.node for u in uses(node) if u.argument in ("index", "indices", "grid")]
    if not indices:
        return math.prod(shape(node))
    if all(dtype == torch.bool for index in indices for dtype in dtypes(index)):
        return 1
    sizes = [shape(index) for index in indices]
    depends_on_data = any(n == math.inf for each in sizes for n in each)
    return math.inf if depends_on_data else math.prod(torch.broadcast_shapes(*map(tuple, sizes)))


def _windows(node: fx.Node, shape: Shape) -> Any:
    windows = _numbers(node, "kernel_size", "size")
    steps = _numbers(node, "stride", "step") or windows
    return math.prod(_ratio(windows[i], steps[i % len(steps)]) for i in range(len(windows)))


def _replicated(node: fx.Node, shape: Shape) -> Any:
    """The elements at the border stand for all that is beyond them."""
    if argument(node, "mode") not in (None, "replicate"):
        return _reflected(node, shape)
    widths = _numbers(node, "padding", "pad")
    return math.prod(1 + max(widths[i], widths[i + 1]) for i in range(0, len(widths), 2))


def _reflected(node: fx.Node, shape: Shape) -> Any:
    """Beside itself an element is shown beyond one border, and beyond both where they are wide."""
    widths, read = _numbers(node, "padding", "pad"), shape(_read(node))
    sides = [(*widths[i : i + 2], read[-1 - i // 2]) for i in range(0, len(widths), 2)]
    return math.prod(1 + bool(left or right) + bool(left + right >= size - 1) for left, right, size in sides)


def _adaptive(node: fx.Node, shape: Shape) -> Any:
    """Neighbouring windows overlap by an element at most, on each side."""
    count = len(_numbers(node, "output_size"))
    sizes = zip(shape(node)[-count:], shape(_read(node))[-count:], strict=True)
    return math.prod(_ratio(result, read) + 1 for result, read in sizes)


def _interpolated(node: fx.Node, shape: Shape) -> Any:
    """Each result reads two neighbours in each direction."""
    sizes = zip(shape(node)[2:], shape(_read(node))[2:], strict=True)
    return math.prod(2 * _ratio(result, read) for result, read in sizes)


def _overlapping(node: fx.Node, shape: Shape) -> Any:
    """Every direction that leads to no memory of its own repeats what the others show."""
    repeats, reach = 1, 0
    directions = zip(_numbers(node, "stride"), _numbers(node, "size"), strict=True)
    for stride, size in sorted(directions, key=lambda d: (d[0], -d[1])):
        repeats *= 1 if stride > reach or size == 1 else size
        reach += stride * (size - 1) if stride > reach else 0
    return repeats


def _steps(node: fx.Node, shape: Shape) -> Any:
    """Each step adds to the state that the last one gave."""
    sizes = argument(node, "batch_sizes")
    return shape(_read(node))[1 if argument(node, "batch_first") else 0] if sizes is None else shape(sizes)[0]


def _ratio(one: Any, other: Any) -> Any:
    return -(-one // other)


_KINDS: Mapping[str, Callable[[fx.Node, Shape], Any]] = {
    "indexed": _indexed,
    "windows": _windows,
    "replicated": _replicated,
    "reflected": _reflected,
    "adaptive": _adaptive,
    "interpolated": _interpolated,
    "overlapping": _overlapping,
    "steps": _steps,
}


# The readers of a value.


@dataclass(frozen=True)
class Readers:
    """How many gradients the readers of each value give it in 16 bits, on average over its elements.

    Attributes:
        reads_low: true for a node that reads its values in 16 bits.
        moves: true for one that gives a view or a copy of them, and hands on the gradients of its own readers.
        most: of how many gradients a sum may be made in 16 bits.
        counts: the numbers of gradients, by value.
    """

    reads_low: Callable[[fx.Node], bool] = lambda _: False
    moves: Callable[[fx.Node], bool] = lambda _: False
    most: float = math.inf
    counts: dict[fx.Node, float] = field(default_factory=dict[fx.Node, float])

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        reads_low: Callable[[fx.Node], bool],
        moves: Callable[[fx.Node], bool],
        limit: DepthLimit | None,
    ) -> Readers:
        """Count them in ``graph``, which has abstract values, if there is a limit."""
        if limit is None or limit.most is None:
            return cls()
        readers = cls(reads_low, moves, limit.most)
        for node in reversed(graph.nodes):
            given = [readers.given(user, node) for user in node.users for use in uses(user) if use.node is node]
            in_parts = any(map(is_member, node.users))  # each element is in one of them
            readers.counts[node] = max(given, default=0.0) if in_parts else sum(given)
        return readers

    def given(self, reader: fx.Node, read: fx.Node) -> float:
        """How many gradients an element of ``read`` gets from one use by ``reader``."""
        if is_member(reader):
            return self.counts[reader]
        if not self.reads_low(reader):
            return 0.0
        if not self.moves(reader):
            return 1.0
        return self.counts[reader] * min(1.0, elements(reader) / max(elements(read), 1))

    def casts(self, value: fx.Node) -> int:
        """How many casts of ``value`` its readers share, so that each gets few enough gradients."""
        return max(1, math.ceil(self.counts.get(value, 0.0) / self.most))
