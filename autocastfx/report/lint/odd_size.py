"""Find sizes of 16-bit products that are not multiples of 8, which tensor cores would pad."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, example, module_path, tensors, uses
from autocastfx.graph.walk import Located


@dataclass(frozen=True)
class OddSize:
    """A size of a 16-bit op that is not a multiple of 8.

    Attributes:
        node, op, module: the op.
        name: ``M``, ``N`` or ``K`` of the product of an M x K and a K x N matrix; ``channels in`` or ``channels out``
            of each group of a convolution; ``head`` of an attention.
        operand: path of the weight with this size; ``input`` if it depends on sizes of the inputs that have
            differed from call to call; else ``activation``.
        size: its value for the example inputs.
        padded: the next multiple of 8.
        wasted: share of padding in the padded size, if only this size is padded.
        flops: operations of the node in one forward pass.
        table_of: path of the embedding that uses the same weight, so that N is the vocabulary; else empty.
    """

    node: str
    op: str
    module: str
    name: str
    operand: str
    size: int
    padded: int
    wasted: float
    flops: int
    table_of: str = ""


# Find the sizes of matrix products, convolutions and attentions that tensor cores tile.

TILE = 8  # numbers of 16 bits in 16 bytes, the unit of tensor cores and their loads

# For each op: the arguments of the left and the right matrix, and True if the right one is stored transposed.
_MATRICES = {
    "linear": ("input", "weight", True),
    "mm": ("self", "mat2", False),
    "addmm": ("mat1", "mat2", False),
    "bmm": ("self", "mat2", False),
    "baddbmm": ("batch1", "batch2", False),
    "matmul": ("self", "other", False),
}
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


@dataclass(frozen=True)
class Size:
    """A size of a matrix product (M x K times K x N), a convolution or an attention.

    Attributes:
        name: ``M``, ``N``, ``K``, ``channels in``, ``channels out`` (of each group) or ``head``.
        operand: path of the weight with this size; ``input`` if it depends on sizes of the inputs that have
            differed from call to call; else ``activation``.
        size: its value for the example inputs.
    """

    name: str
    operand: str
    size: int

    @property
    def padded(self) -> int:
        """The next multiple of :data:`TILE`."""
        return -(-self.size // TILE) * TILE

    @property
    def wasted(self) -> float:
        """The share of padding in the padded size."""
        return 1 - self.size / self.padded if self.padded else 0.0


def sizes_of(located: Located) -> tuple[Size, ...]:
    """Return the sizes of a captured node that tensor cores tile; none for other ops and for products with vectors.

    Sizes that depend on data are left out.
    """
    op = op_name(located.node)
    if op in _MATRICES:
        sizes = _of_product(located, *_MATRICES[op])
    elif op in (*_CONVOLUTIONS, *_TRANSPOSED):
        sizes = _of_convolution(located, op)
    elif op == "scaled_dot_product_attention":
        sizes = _of_attention(located)
    else:
        return ()
    return tuple(size for size in sizes if size is not None)


def _of_product(located: Located, left_name: str, right_name: str, transposed: bool) -> Iterator[Size | None]:
    left, right = (_tensor(located.node, name) for name in (left_name, right_name))
    if left is None or right is None or left.dim() < 2 or right.dim() < 2:
        return
    rows = [left.shape[-2]] if right.dim() > 2 else left.shape[:-1]
    inner, columns = right.shape[-2:][::-1] if transposed else right.shape[-2:]
    yield _size(located, "M", left_name, rows)
    yield _size(located, "N", right_name, [columns])
    if _weight(located, left_name) and not _weight(located, right_name):
        yield _size(located, "K", left_name, [left.shape[-1]])
    else:
        yield _size(located, "K", right_name, [inner])


def _of_convolution(located: Located, op: str) -> Iterator[Size | None]:
    weight = _tensor(located.node, "weight")
    if weight is None:
        return
    groups = argument(located.node, "groups") or 1
    first, second = weight.shape[0], weight.shape[1]
    transposed = op in _TRANSPOSED or argument(located.node, "transposed") is True
    inside, outside = (first // groups, second) if transposed else (second, first // groups)
    yield _size(located, "channels in", "weight", [inside])
    yield _size(located, "channels out", "weight", [outside])


def _of_attention(located: Located) -> Iterator[Size | None]:
    query, value = (_tensor(located.node, name) for name in ("query", "value"))
    if query is None or value is None:
        return
    yield _size(located, "head", "query", [query.shape[-1]])
    if example(value.shape[-1]) != example(query.shape[-1]):
        yield _size(located, "head", "value", [value.shape[-1]])


def _size(located: Located, name: str, source: str, factors: Sequence[Any]) -> Size | None:
    if any(example(factor) is None for factor in factors):
        return None
    from_inputs = any(isinstance(factor, torch.SymInt) and factor.node.maybe_as_int() is None for factor in factors)
    operand = "input" if from_inputs else _weight(located, source) or "activation"
    return Size(name, operand, math.prod(map(example, factors)))


def _weight(located: Located, name: str) -> str:
    read = argument(located.node, name)
    return located.stored_as(read) if isinstance(read, fx.Node) else ""


def _tensor(node: fx.Node, name: str) -> torch.Tensor | None:
    read = argument(node, name)
    values = tensors(read) if isinstance(read, fx.Node) else ()
    return values[0] if len(values) == 1 else None


def odd_sizes(
    located: Sequence[Located], flops: Mapping[str, int], parameters: Mapping[str, torch.Tensor]
) -> Iterator[OddSize]:
    """Yield the odd sizes, in graph order, of the nodes of a captured graph.

    ``flops`` has the operations by node name, for the products that run in 16 bits; ``parameters`` has parameters and
    buffers by name, tied ones under each of their names.
    """
    tables = dict(_tables(located, parameters))
    for one in (one for one in located if one.name in flops):
        for size in sizes_of(one):
            if size.size != size.padded:
                tied = tables.get(id(parameters.get(size.operand)), "") if size.name == "N" else ""
                place = (one.name, op_name(one.node), module_path(one.node))
                numbers = (size.size, size.padded, size.wasted, flops[one.name])
                yield OddSize(*place, size.name, size.operand, *numbers, table_of=tied)


def _tables(located: Sequence[Located], parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, str]]:
    """Yield the ids of embeddings' weights, with the embeddings' module paths."""
    for one in (one for one in located if op_name(one.node) == "embedding"):
        path = next((one.stored_as(use.node) for use in uses(one.node) if use.argument == "weight"), "")
        if path in parameters:
            yield id(parameters[path]), module_path(one.node) or "(root)"
