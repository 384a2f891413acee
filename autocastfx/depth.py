"""How many elements a node reduces into one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from autocastfx.example_size import example
from autocastfx.graph import argument, tensors, value

__all__ = ["KINDS", "depth"]

# What tells the depth: the sizes of a weight (convolutions), of a weight whose first dimension is the input's
# (transposed ones), of the left matrix's rows, of an einsum's contracted letters, or of what goes in and comes out.
KINDS = ("weight", "transposed_weight", "rows", "equation", "elements")
_LEFT = ("mat1", "batch1", "mat", "self", "input")


def depth(node: fx.Node, kind: str) -> int | None:
    """How many elements ``node`` reduces into one, for the sizes of the example inputs.

    None if these are unknown, or depend on data.

    Args:
        node: with an abstract value.
        kind: one of :data:`KINDS`.
    """
    if kind in ("weight", "transposed_weight"):
        sizes, axis = _sizes(argument(node, "weight")), int(kind != "weight")
        groups = argument(node, "groups") if axis else 1
        return math.prod(sizes) // max(sizes[axis], 1) // (groups or 1) if sizes else None
    if kind == "rows":
        left = next((arg for name in _LEFT if (arg := argument(node, name)) is not None), None)
        sizes = _sizes(left)
        return sizes[-1] if sizes else None
    if kind == "equation":
        operands = argument(node, "tensors") or argument(node, "operands") or ()
        return _contracted(str(argument(node, "equation")), [_sizes(operand) for operand in operands])
    before, after = _sizes(node.all_input_nodes[0] if node.all_input_nodes else None), _sizes(node)
    return math.prod(before) // max(math.prod(after), 1) if before is not None and after is not None else None


def _sizes(node: object) -> list[int] | None:
    """Sizes of a node's first tensor, a symbolic one as its example."""
    found = tensors(node) if isinstance(node, fx.Node) and value(node) is not None else ()
    sizes: list[Any] = [example(n) for n in found[0].shape] if found else [None]
    return None if None in sizes else sizes


def _contracted(equation: str, operands: Sequence[list[int] | None]) -> int | None:
    """Product of the sizes of an einsum's letters that its result lacks; dimensions of an ellipsis always stay."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(operands):
        return None
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, _, after = term.partition("...")
        if operand is None:
            return None
        sizes.update(zip(before, operand, strict=False))
        sizes.update(zip(reversed(after), reversed(operand), strict=False))
    return math.prod(size for letter, size in sizes.items() if letter not in result)
