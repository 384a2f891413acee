"""Attention that no fused kernel of CUDA takes, so that scores and their softmax go through memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import argument, value


def unfused_attention(nodes: Iterable[fx.Node]) -> Iterator[tuple[str, str]]:
    """Yield the name of each such node of a converted graph, and what to do.

    FlashAttention takes no mask, and the memory-efficient kernel no heads that share keys; neither takes a mask whose
    last stride is not 1 (torch's ``sdp_utils.cpp``).
    """
    for node in nodes:
        if node.op != "call_function" or base_name(op_name(node)) != "scaled_dot_product_attention":
            continue
        mask: Any = argument(node, "attn_mask")
        if mask is None:
            continue
        given = value(mask)
        if argument(node, "enable_gqa"):
            yield node.name, "it has a mask, and heads share keys: repeat the keys and values, or leave the mask out"
        elif given.ndim and given.shape[-1] != 1 and given.stride(-1) != 1:
            yield node.name, "the last stride of its mask is not 1: make the mask contiguous"
