"""Ops that give elements of their input as they are: views, by torch's schemas, and copies."""

from __future__ import annotations

import torch
from torch import fx

from autocastfx.graph.alias import aliased, mutated_inputs
from autocastfx.graph.node import dtypes, value
from autocastfx.graph.op_name import op_name

__all__ = ["is_view", "is_view_or_copy", "moves_each_once", "takes_any_layout"]

_COPIES = ("clone", "_to_copy", "_unsafe_view", "repeat", "tile", "type_as")  # their schemas name no shared storage
_ANY_LAYOUT = ("clone", "contiguous", "flatten", "ravel", "reshape", "reshape_as")  # they copy where they have to
# They share storage with their input and give other numbers.
_REINTERPRETS = ("_conj", "_neg_view", "imag", "real", "view_as_complex", "view_as_real")
_REPEATS = ("as_strided", "broadcast_to", "expand", "expand_as", "repeat", "tile", "unfold")


def is_view(node: fx.Node) -> bool:
    """True for an op whose result shares storage with its input, if need be: ``reshape`` and ``to`` may copy."""
    if mutated_inputs(node) or op_name(node) in _REINTERPRETS or node.target is torch.ops.aten.view.dtype:
        return False
    return any(aliased(node))


def is_view_or_copy(node: fx.Node) -> bool:
    """True for an op that gives elements of its input, in storage of either."""
    return op_name(node) in _COPIES or is_view(node)


def takes_any_layout(node: fx.Node) -> bool:
    """True for a view or copy that works whatever the strides of its input are."""
    return op_name(node) in _ANY_LAYOUT


def moves_each_once(node: fx.Node) -> bool:
    """True for a view or copy of one tensor, in its dtype, that shows no element twice.

    Its backward adds nothing up, which 16 bits would do with a larger error than float32.
    """
    if not is_view_or_copy(node) or op_name(node) in _REPEATS or not isinstance(value(node), torch.Tensor):
        return False
    return all(dtypes(source) == dtypes(node) for source in node.all_input_nodes[:1])
