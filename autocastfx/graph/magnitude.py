"""Measure the largest and the typical magnitude of a float32 value's elements."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autocastfx.graph.alias import is_view_or_copy
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import Use, argument, constants, has_float32, tensors, uses

__all__ = ["Magnitude", "Measured", "filled", "is_here", "magnitude", "read_as_scores", "takes_mask"]


@dataclass(frozen=True)
class Magnitude:
    """The magnitudes of a value's finite elements.

    Attributes:
        largest: the largest magnitude.
        rms: the root mean square of the elements that are not 0; over several tensors or batches, the largest such
            figure. 0 if all elements are 0, or smaller than about 1e-22.
    """

    largest: float
    rms: float


class Measured(NamedTuple):
    """A :class:`Magnitude` and the number of non-finite elements, as 0-d tensors on one device."""

    largest: torch.Tensor
    rms: torch.Tensor
    non_finite: torch.Tensor

    def magnitude(self) -> Magnitude:
        """Read the numbers. Waits for the device."""
        return Magnitude(float(self.largest), float(self.rms))


def magnitude(found: Any) -> Measured | None:
    """Measure all float32 tensors in ``found`` without waiting for an accelerator.

    Returns None if there is no dense float32 tensor with elements in this process; fake and distributed tensors do not
    count.
    """
    leaves = (leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))
    reached = [_of(leaf.detach()) for leaf in leaves if leaf.dtype == torch.float32 and leaf.numel() and is_here(leaf)]
    if not reached:
        return None
    first, *others = reached
    for more in others:
        largest, rms = torch.maximum(first.largest, more.largest), torch.maximum(first.rms, more.rms)
        first = Measured(largest, rms, first.non_finite + more.non_finite)
    return first


def is_here(tensor: torch.Tensor) -> bool:
    """True for a dense tensor with values in this process."""
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta


def _of(tensor: torch.Tensor) -> Measured:
    low, high = tensor.aminmax()
    if tensor.device.type == "cpu" and math.isfinite(float(low)) and math.isfinite(float(high)):
        # nearly always: then all elements are finite
        return Measured(torch.maximum(-low, high), _rms(tensor), torch.zeros((), dtype=torch.int64))
    is_finite = tensor.isfinite()
    finite = tensor.where(is_finite, 0.0)
    low, high = finite.aminmax()
    return Measured(torch.maximum(-low, high), _rms(finite), (~is_finite).sum())


def _rms(finite: torch.Tensor) -> torch.Tensor:
    # Squares that underflow count as 0; a norm that overflows is limited to float32's largest number.
    norm = torch.linalg.vector_norm(finite).clamp(max=torch.finfo(finite.dtype).max)
    return norm / torch.count_nonzero(finite).clamp(min=1).sqrt()


# Attention scores and the masks that are added to them: values that a softmax alone reads.

# Arguments that may be a mask added to scores. A saturated mask needs headroom there, or score + mask is -inf.
_MASKED = {
    "add": ("self", "other"),
    "sub": ("self", "other"),
    "addmm": ("self",),
    "addbmm": ("self",),
    "baddbmm": ("self",),
    "scaled_dot_product_attention": ("attn_mask",),
}
_SIZES = ("sym_size", "sym_stride", "sym_numel")
# Arguments that are scores, of which what is far below the others counts nothing, however far. (Not those of a
# log_softmax, which tells how far.)
_SCORES = {"softmax": ("self",), "_softmax": ("self",), "_safe_softmax": ("self",)}
# Arguments whose number is written in the place of some elements.
_FILLED = {"where": ("self", "other"), "masked_fill": ("value",)}


def read_as_scores(node: fx.Node, written: Set[fx.Node]) -> frozenset[fx.Node]:
    """``node`` and the views, copies and sums of it; none of them if any is read otherwise than as scores or a mask,
    or by nothing.

    Args:
        node: a float32 value.
        written: values whose storage is written into, which are not followed.
    """
    seen, queue = {node}, [node]
    while queue:
        read = queue.pop()
        if read in written or not read.users:
            return frozenset()
        for reader in read.users:
            if op_name(reader) in _SIZES:
                continue
            arguments = [u.argument for u in uses(reader) if u.node is read]
            if op_name(reader) == "scaled_dot_product_attention" and arguments == ["attn_mask"]:
                continue
            if len(arguments) == 1 and arguments[0] in _SCORES.get(op_name(reader), ()):
                continue
            if len(arguments) != 1 or not _passes_on(reader, arguments[0]):
                return frozenset()
            if reader not in seen:
                seen.add(reader)
                queue.append(reader)
    return frozenset(seen)


def takes_mask(node: fx.Node, use: Use) -> bool:
    """True if ``node`` may add the value of this use to scores, as a mask."""
    return use.argument in _MASKED.get(base_name(op_name(node)), ())


def filled(node: fx.Node) -> tuple[str, float] | None:
    """The argument and the number that ``node`` fills in beside a float32 value, if it is one."""
    names = _FILLED.get(op_name(node), ())
    given = [(name, number) for name, number in constants(node) if name in names]
    beside = has_float32(node) and any(has_float32(u.node) for u in uses(node))
    return given[0] if beside and len(given) == 1 else None


def _passes_on(node: fx.Node, name: str) -> bool:
    """True if a mask, or scores, read as argument ``name`` make the result of ``node`` a mask or scores."""
    op, found = op_name(node), tensors(node)
    if len(found) != 1 or not found[0].is_floating_point():
        return False
    if op in _MASKED:
        factor = argument(node, "alpha" if op in ("add", "sub") else "beta")  # by which a mask is multiplied
        return name in _MASKED[op] and factor in (None, 1)
    return (name == "self" and is_view_or_copy(node)) or filled(node) is not None
