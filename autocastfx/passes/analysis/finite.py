"""Tell which values hold finite numbers alone, whatever the inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autocastfx.graph.alias import is_view_or_copy, reachable
from autocastfx.graph.magnitude import is_here
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import constants, has_float32

__all__ = ["is_made_finite"]

# Ops that make finite values of finite ones as masks are made, beside views and copies: choices and products.
_CHOICES = ("where", "masked_fill", "mul", "neg", "sub", "rsub", "add", "embedding")
_FILLED = ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_STAYS_FINITE = frozenset((*_CHOICES, *_FILLED, "scalar_tensor"))


def is_made_finite(made: fx.Node, attributes: Mapping[str, Any], written: Collection[fx.Node]) -> bool:
    """True if ``made`` is made of finite numbers, seen or looked up in a table, by ops that keep them finite.

    Args:
        made: the node, as of a mask.
        attributes: what ``get_attr`` nodes read, parameters and buffers apart.
        written: values in whose storage something writes.
    """
    made_of = set(reachable([made], lambda n: filter(has_float32, n.all_input_nodes) if _is_looked_into(n) else ()))
    return made_of.isdisjoint(written) and all(_stays_finite(node, attributes) for node in made_of)


def _is_looked_into(node: fx.Node) -> bool:
    return op_name(node) not in ("embedding", "lift_fresh_copy")


def _stays_finite(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    if op_name(node) == "lift_fresh_copy":  # of a constant in the code
        held = attributes.get(str(node.all_input_nodes[0].target))
        return isinstance(held, torch.Tensor) and is_here(held) and bool(held.isfinite().all())
    is_finite = base_name(op_name(node)) in _STAYS_FINITE or is_view_or_copy(node)
    return is_finite and all(math.isfinite(n) for _, n in constants(node))
