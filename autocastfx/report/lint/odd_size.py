"""Find sizes of 16-bit products that are not multiples of 8, which tensor cores would pad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autocastfx.graph.names import op_name
from autocastfx.graph.node import module_path, uses
from autocastfx.graph.walk import Located
from autocastfx.report.lint.tensor_core_shapes import sizes_of

__all__ = ["OddSize", "odd_sizes"]


@dataclass(frozen=True)
class OddSize:
    """A size of a 16-bit op that is not a multiple of 8.

    Attributes:
        node, op, module: the op.
        name: ``M``, ``N`` or ``K`` of the product of an M x K and a K x N matrix; ``channels in`` or ``channels out``
            of each group of a convolution; ``head`` of an attention.
        operand: path of the weight with this size; ``input`` if the size depends on the inputs' sizes; else
            ``activation``.
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


def odd_sizes(
    located: Sequence[Located], flops: Mapping[str, int], held: Mapping[str, torch.Tensor]
) -> Iterator[OddSize]:
    """Yield the odd sizes, in graph order.

    Args:
        located: all nodes of the captured graph.
        flops: operations by node name, for the products that run in 16 bits.
        held: parameters and buffers by name, tied ones under each of their names.
    """
    tables = dict(_tables(located, held))
    for one in (one for one in located if one.name in flops):
        for size in sizes_of(one):
            if size.size != size.padded:
                tied = tables.get(id(held.get(size.operand)), "") if size.name == "N" else ""
                place = (one.name, op_name(one.node), module_path(one.node))
                numbers = (size.size, size.padded, size.wasted, flops[one.name])
                yield OddSize(*place, size.name, size.operand, *numbers, table_of=tied)


def _tables(located: Sequence[Located], held: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, str]]:
    """Yield the ids of embeddings' weights, with the embeddings' module paths."""
    for one in (one for one in located if op_name(one.node) == "embedding"):
        path = next((one.stored_as(use.node) for use in uses(one.node) if use.argument == "weight"), "")
        if path in held:
            yield id(held[path]), module_path(one.node) or "(root)"
