"""Where the elements of a view's source stand in the view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autocastfx.capture.affine import Affine, Known
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, number, tensors

__all__ = ["seen_through"]

_SAME_PLACES = ("clone", "contiguous", "detach", "lift_fresh_copy", "to")
_RESHAPES = ("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view")

# For each dimension of the source: the dimension that it becomes, if any, where it begins, and its step.
_Places = Sequence[tuple[int | None, Any, int]]


def seen_through(node: fx.Node, held: Known) -> Known | None:
    """The result of the view, copy or cast ``node``, whose source is ``held``; None if it is not known."""
    before, after = tensors(node.all_input_nodes[0])[0], tensors(node)[0]
    places = _places(node, before, after)
    return None if places is None else held.at(lambda affine: _placed(affine, places, after.ndim))


def _placed(held: Affine, places: _Places, ndim: int) -> Affine:
    start, slopes = held.start, [0] * ndim
    for slope, (dim, first, step) in zip(held.slopes, places, strict=True):
        start = start + slope * first if slope else start
        if dim is not None:
            slopes[dim] = slope * step
    return Affine(start, tuple(slopes))


def _places(node: fx.Node, before: torch.Tensor, after: torch.Tensor) -> _Places | None:
    name, dims = op_name(node), list(range(before.ndim))
    if name in _SAME_PLACES:
        return [(dim, 0, 1) for dim in dims]
    if name in ("broadcast_to", "expand", "expand_as"):
        return [(dim + after.ndim - before.ndim, 0, 1) for dim in dims]
    if name in ("slice", "select"):
        return _cut(node, name, dims)
    if name in ("transpose", "t", "mT", "permute"):
        order = _order(node, name, dims)
        return [(order.index(dim), 0, 1) for dim in dims]
    return _paired(before, after) if name in _RESHAPES else None


def _order(node: fx.Node, name: str, dims: list[int]) -> list[int]:
    if name == "permute":
        return [dim % len(dims) for dim in argument(node, "dims")]
    if len(dims) < 2:
        return dims
    pair = (argument(node, "dim0"), argument(node, "dim1")) if name == "transpose" else (-2, -1)
    a, b = (dim % len(dims) for dim in pair)
    return [{a: b, b: a}.get(dim, dim) for dim in dims]


def _cut(node: fx.Node, name: str, dims: list[int]) -> _Places | None:
    is_select, cut = name == "select", (argument(node, "dim") or 0) % len(dims)
    first = number(argument(node, "index" if is_select else "start") or 0)
    step = 1 if is_select else argument(node, "step") or 1
    if first is None or not isinstance(step, int) or not Affine(first, ()).is_at_least(0, ()):
        return None
    gone: int | None = None if is_select else cut
    return [(gone, first, step) if dim == cut else (dim - (is_select and dim > cut), 0, 1) for dim in dims]


def _paired(before: torch.Tensor, after: torch.Tensor) -> _Places | None:
    """Where a view adds and takes out dimensions of one element alone."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    def several(tensor: torch.Tensor) -> list[int]:
        return [dim for dim, size in enumerate(tensor.shape) if not statically_known_true(size == 1)]

    pairs = list(zip(several(before), several(after), strict=False))
    if len(pairs) != len(several(before)) or len(pairs) != len(several(after)):
        return None
    if not all(statically_known_true(before.shape[a] == after.shape[b]) for a, b in pairs):
        return None
    become = dict(pairs)
    return [(become.get(dim), 0, 1) for dim in range(before.ndim)]
