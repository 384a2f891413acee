"""Count an op's operations, by torch's formulas, and its bytes, by sizes and dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.graph.alias import aliased, moves
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes, example_size, is_member, tensors, uses, value

__all__ = ["Work", "work_of"]

_LOW = {dtype_name(dtype) for dtype in LOW_DTYPES}
_GATHERS = ("embedding", "gather", "index", "index_select", "take", "take_along_dim")  # reads only elements returned


@dataclass(frozen=True)
class Work:
    """The operations and bytes of an op.

    Attributes:
        flops: multiplications and additions of matrix products and convolutions; 0 for other ops, which bytes bound.
            None if the op is not ATen's, so that torch has no formula, or cannot run on abstract values.
        bytes: its inputs read once and its outputs written; 0 for a view, and for an op without tensor outputs.
        reads: names of the dtypes that it reads, each once; of its outputs if it reads no tensor.
    """

    flops: int | None
    bytes: int
    reads: tuple[str, ...]

    @property
    def low(self) -> bool:
        """True if the op reads 16-bit values, which tensor cores take."""
        return not _LOW.isdisjoint(self.reads)


def work_of(node: fx.Node) -> Work:
    """Count the work of ``node`` for the sizes of the example inputs. A size that depends on data counts as 1."""
    read = [t for source in node.all_input_nodes for t in tensors(source)]
    names = tuple(dict.fromkeys(dtype_name(t.dtype) for t in read or tensors(node)))
    if not _moves(node):
        return Work(0, 0, names)
    return Work(_flops(node), _bytes(node, read), names)


def _moves(node: fx.Node) -> bool:
    """True if the node reads and writes elements; false for sizes, and for possible views that change no dtype."""
    if is_member(node) or not tensors(node):
        return False
    return moves(node) or any(set(dtypes(node)) != set(dtypes(read)) for read in aliased(node))


def _bytes(node: fx.Node, read: list[torch.Tensor]) -> int:
    written = sum(map(_size, tensors(node)))
    if op_name(node) in _GATHERS:
        read = [t for t in read if not t.is_floating_point()]
        return 2 * written + sum(map(_size, read))
    return sum(map(_size, read)) + written


def _size(tensor: torch.Tensor) -> int:
    return math.prod(map(example_size, tensor.shape)) * tensor.itemsize


def _flops(node: fx.Node) -> int | None:
    matrices = [t for use in uses(node) for t in tensors(use.node) if t.is_floating_point() and t.dim() >= 2]
    if len(matrices) < 2 and isinstance(node.target, OpOverload):
        return 0
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    args, kwargs = map_aggregate((node.args, node.kwargs), _meta)
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)
    except Exception:  # the op's sizes depend on data, or it has no abstract kernel
        return None
    return counter.get_total_flops()


def _meta(leaf: Any) -> Any:
    """Return an argument as a meta tensor with the sizes of the example inputs; other arguments as numbers."""
    return pytree.tree_map(_without_storage, value(leaf)) if isinstance(leaf, fx.Node) else example_size(leaf)


def _without_storage(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty([example_size(n) for n in leaf.shape], dtype=leaf.dtype, device="meta")
    return example_size(leaf)
