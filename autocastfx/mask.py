"""Attention masks: values that only ever say which scores do not count, however large they are."""

from __future__ import annotations

from torch import fx

from autocastfx.graph import Use, uses, value
from autocastfx.op_name import base_name, op_name

__all__ = ["is_mask", "takes_mask"]

# Arguments that may be a mask added to scores. A saturated mask needs headroom there, or score + mask is -inf.
_MASKED = {
    "add": ("self", "other"),
    "sub": ("self", "other"),
    "addmm": ("self",),
    "addbmm": ("self",),
    "baddbmm": ("self",),
    "scaled_dot_product_attention": ("attn_mask",),
}
_PASSES_MASK = (
    "view",
    "reshape",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "transpose",
    "permute",
    "to",
    "alias",
)


def takes_mask(node: fx.Node, use: Use) -> bool:
    """Whether ``node`` may add what it reads there to scores, as a mask."""
    return use.argument in _MASKED.get(base_name(op_name(node)), ())


def is_mask(node: fx.Node) -> bool:
    """Whether a value reaches an addition or an attention mask through views alone."""
    seen, queue = {node}, [node]
    while queue:
        read = queue.pop()
        for reader in read.users:
            if any(u.node is read and takes_mask(reader, u) for u in uses(reader)):
                return True
            if base_name(op_name(reader)) in _PASSES_MASK and reader not in seen and value(reader) is not None:
                seen.add(reader)
                queue.append(reader)
    return False
