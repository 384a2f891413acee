"""Attention scores and the masks that are added to them: values that a softmax alone reads."""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from autocastfx.graph.node import Use, argument, constants, has_float32, tensors, uses
from autocastfx.graph.op_name import base_name, op_name
from autocastfx.graph.view_ops import is_view_or_copy

__all__ = ["filled", "read_as_scores", "takes_mask"]

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
