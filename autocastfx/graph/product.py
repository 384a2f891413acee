"""Find how many elements a contraction adds up for each element of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autocastfx.graph.node import argument, example, tensors, value

__all__ = ["KINDS", "Product", "Size", "product"]

# Sources of the depth: a weight (convolutions), a weight whose first dimension is the input's (transposed ones), two
# matrices, two vectors, an einsum's equation, the dimensions named (tensordot), nothing (``outer`` contracts none), or
# the numbers of elements read and produced.
KINDS = ("weight", "transposed_weight", "matrices", "vectors", "equation", "dimensions", "outer", "elements")
_LEFT = ("mat1", "batch1", "mat", "self", "input", "x")
_RIGHT = ("mat2", "batch2", "vec", "other", "tensor", "weight", "y")


Size = Callable[[Any], Any]


@dataclass(frozen=True)
class Product:
    """A contraction.

    Attributes:
        depth: the number of elements added up into one element of the result.
        is_sum: True if each result is one row times one column at any sizes: a dot product per member of a batch.
    """

    depth: float
    is_sum: bool = False


def product(node: fx.Node, kind: str, size: Size = example) -> Product | None:
    """Describe ``node`` as a contraction; None if its sizes are unknown or depend on data.

    Args:
        node: a node with an abstract value.
        kind: one of :data:`KINDS`.
        size: maps a size, which may be symbolic, to a number: its value for the example inputs, or its upper bound;
            to itself, if the depth is to be symbolic; to None if unknown.
    """
    if kind == "outer":
        return Product(1)
    if kind in ("weight", "transposed_weight"):
        sizes, axis = _sizes(argument(node, "weight"), size), int(kind != "weight")
        groups = argument(node, "groups") if axis else 1
        return Product(math.prod(sizes) // max(sizes[axis], 1) // (groups or 1)) if sizes else None
    if kind == "vectors":
        sizes = _sizes(next((a for n in _LEFT if (a := argument(node, n)) is not None), None), size)
        return Product(sizes[-1], is_sum=True) if sizes else None
    if kind == "matrices":
        return _of_matrices(node, size)
    if kind == "equation":
        operands = argument(node, "tensors") or argument(node, "operands") or ()
        return _of_equation(str(argument(node, "equation")), operands, size)
    if kind == "dimensions":
        sizes, dims = _sizes(argument(node, "self"), size), argument(node, "dims_self")
        return Product(math.prod(sizes[d] for d in dims)) if sizes and isinstance(dims, (list, tuple)) else None
    before, after = (_sizes(each, size) for each in (next(iter(node.all_input_nodes), None), node))
    return Product(math.prod(before) // max(math.prod(after), 1)) if before is not None and after is not None else None


def _of_matrices(node: fx.Node, size: Size) -> Product | None:
    left, right = (next((a for n in names if (a := argument(node, n)) is not None), None) for names in (_LEFT, _RIGHT))
    sizes, others = _sizes(left, size), _sizes(right, size)
    if not sizes:
        return None
    rows, columns = _shape(left)[-2:-1], _shape(right)[-1:] if others and len(others) > 1 else ()
    return Product(sizes[-1], all(_is_one(n) for n in (*rows, *columns)) and others is not None)


def _of_equation(equation: str, operands: Sequence[Any], size: Size) -> Product | None:
    """Describe an einsum. It contracts the letters that its result lacks, and never the dimensions of an ellipsis."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(operands):
        return None
    letters: list[dict[str, Any]] = []
    sizes: dict[str, float] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, dots, after = term.partition("...")
        known, shape = _sizes(operand, size), _shape(operand)
        if known is None:
            return None
        found = dict(zip(before, shape, strict=False)) | dict(zip(reversed(after), reversed(shape), strict=False))
        sizes.update(zip(before, known, strict=False))
        sizes.update(zip(reversed(after), reversed(known), strict=False))
        letters.append(found | ({"...": None} if dots and len(shape) > len(before + after) else {}))
    kept = {*result.replace("...", ""), "..."}
    shared = set.intersection(*(set(each) for each in letters))
    apart = [n for each in letters for letter, n in each.items() if letter in kept and letter not in shared]
    contracted = math.prod(n for letter, n in sizes.items() if letter not in kept)
    return Product(contracted, all(map(_is_one, apart)) and contracted > 1)


def _is_one(size: Any) -> bool:
    """True for a size that is 1 in every call; false for a symbolic size, even if it is 1 in the example."""
    return isinstance(size, int) and size == 1


def _shape(node: object) -> tuple[Any, ...]:
    """Return the sizes of a node's first tensor, symbolic or not."""
    found = tensors(node) if isinstance(node, fx.Node) and value(node) is not None else ()
    return tuple(found[0].shape) if found else ()


def _sizes(node: object, size: Size) -> list[Any] | None:
    """Return the sizes of a node's first tensor as numbers; None if one is unknown."""
    found = tensors(node) if isinstance(node, fx.Node) and value(node) is not None else ()
    sizes = [size(n) for n in found[0].shape] if found else [None]
    return None if None in sizes else sizes
