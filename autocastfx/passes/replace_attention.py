"""Replaces torch's attention on a CPU: by its formula where there is dropout, by our operator for few tokens.

Fused attention on a CPU knows no dropout. With it torch takes the formula: it widens query, key and value, and keeps
all weights in float32 for backward. Written out, the products are 16-bit ones, and the list decides the softmax.

Without dropout it stays one operator; that of this package goes backward faster where sequences are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autocastfx.graph.names import op_name
from autocastfx.graph.node import (
    all_names,
    argument,
    elements,
    example_size,
    is_float32,
    place_like,
    set_value,
    stand_for,
    tensors,
    value,
)
from autocastfx.passes.patterns.patterns import MATH_ATTENTION, SHORT_ATTENTION
from autocastfx.passes.state import Pass, Policy, State
from autocastfx.plan.plan import Recomposed
from autocastfx.policy.rule import Category
from autocastfx.runtime.operators.short_attention import TOKENS, short_attention

__all__ = ["RecomputeAttention", "WriteOutAttention", "recompute_attention", "write_out_attention"]

# The ops that stand for attention.
_PARTS = ("mul", "transpose", "matmul", "new_ones", "tril", "where", "add", "softmax", "_safe_softmax", "dropout")
_aten: Any = torch.ops.aten


def write_out_attention(graph: fx.Graph, category: Callable[[fx.Node], Category | None]) -> tuple[Recomposed, ...]:
    """Replace each ``scaled_dot_product_attention`` with dropout by its formula, where the list lets it run in 16 bits.

    It stays if it groups heads, if its scale is not known, if a size is 0, if a mask is larger than the scores, and if
    not all that it reads is float32. Dropout draws the same numbers.

    Args:
        graph: captured for a CPU, with abstract values.
        category: of a node, by the list.
    """
    found: list[Recomposed] = []
    for node in list(graph.nodes):
        if op_name(node) == "scaled_dot_product_attention" and category(node) is Category.ALLOW:
            call = _call(node)
            if call is not None:
                with graph.inserting_before(node):
                    made = call.written_out(node)
                node.replace_all_uses_with(made)
                stand_for(made, *all_names(node))
                graph.erase_node(node)
                found.append(Recomposed(MATH_ATTENTION, made.name, (node.name,)))
    return tuple(found)


def recompute_attention(graph: fx.Graph, category: Callable[[fx.Node], Category | None]) -> tuple[Recomposed, ...]:
    """Make of each ``scaled_dot_product_attention`` of few tokens without dropout that of this package, likewise.

    Args:
        graph: captured for a CPU, with abstract values.
        category: of a node, by the list.
    """
    found: list[Recomposed] = []
    for node in graph.nodes:
        if node.target is _aten.scaled_dot_product_attention.default and category(node) is Category.ALLOW:
            query, key = argument(node, "query"), argument(node, "key")
            is_other = argument(node, "dropout_p") or argument(node, "enable_gqa")
            if not is_other and all(_has_few_tokens(read) for read in (query, key)):
                node.target = short_attention
                found.append(Recomposed(SHORT_ATTENTION, node.name, (node.name,)))
    return tuple(found)


def _has_few_tokens(read: fx.Node) -> bool:
    """In the example: when called, the operator looks itself."""
    return is_float32(read) and tensors(read)[0].ndim == 4 and _sizes(read)[-2] <= TOKENS


@dataclass(frozen=True)
class _Attention:
    """The arguments of a call."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    is_causal: bool
    dropout: float
    scale: float

    def written_out(self, node: fx.Node) -> fx.Node:
        """The formula's last node, which gives what ``node`` gives."""

        def op(part: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            name = f"{node.name.replace('scaled_dot_product_', '')}_{part}"
            made = node.graph.create_node("call_function", target, args, kwargs, name)
            place_like(made, node)
            set_value(made, target(*map_arg(args, value), **map_arg(kwargs, value)))
            return made

        def size(read: fx.Node) -> Any:
            found = tensors(read)[0].shape[-2]
            return found if isinstance(found, int) else op("size", _aten.sym_size.int, read, -2)

        query = self.query if self.scale == 1 else op("scaled", _aten.mul.Tensor, self.query, self.scale)
        scores = op("scores", _aten.matmul.default, query, op("keys", _aten.transpose.int, self.key, -2, -1))
        mask = self.mask
        softmax = _aten.softmax.int if mask is None else _aten._safe_softmax.default  # a mask may hide all of a row
        if self.is_causal:
            sizes = [size(self.query), size(self.key)]
            ones = op("ones", _aten.new_ones.default, scores, sizes, dtype=torch.bool)
            mask = op("causal", _aten.tril.default, ones)
        if mask is not None and _is_bool(mask):
            scores = op("masked", _aten.where.ScalarOther, mask, scores, -math.inf)
        elif mask is not None:
            scores = op("masked", _aten.add.Tensor, scores, mask)
        weights = op("dropout", _aten.dropout.default, op("softmax", softmax, scores, -1), self.dropout, True)
        return op("values", _aten.matmul.default, weights, self.value)


def _call(node: fx.Node) -> _Attention | None:
    """The arguments of ``node``, if it is attention that can be written out."""
    query, key, values, mask = (argument(node, name) for name in ("query", "key", "value", "attn_mask"))
    dropout, scale = argument(node, "dropout_p"), argument(node, "scale")
    is_plain = all(is_float32(read) and elements(read) for read in (query, key, values))
    if is_plain and scale is None and isinstance(tensors(query)[0].shape[-1], int):
        scale = 1 / math.sqrt(tensors(query)[0].shape[-1])
    drops = isinstance(dropout, float) and dropout > 0
    if not (is_plain and drops and isinstance(scale, float)) or argument(node, "enable_gqa"):
        return None
    if mask is not None and not ((is_float32(mask) or _is_bool(mask)) and _fits(mask, query, key)):
        return None
    return _Attention(query, key, values, mask, bool(argument(node, "is_causal")), dropout, scale)


def _fits(mask: fx.Node, query: fx.Node, key: fx.Node) -> bool:
    """True if the scores keep their sizes under ``mask``, in the example: torch refuses it otherwise."""
    q, k, given = (_sizes(node) for node in (query, key, mask))
    scores = (*torch.broadcast_shapes(q[:-2], k[:-2]), q[-2], k[-2])
    return tuple(torch.broadcast_shapes(scores, given)) == scores


def _sizes(node: fx.Node) -> Sequence[int]:
    return [example_size(size) for size in tensors(node)[0].shape]


def _is_bool(node: fx.Node) -> bool:
    return tensors(node)[0].dtype == torch.bool


class WriteOutAttention(Pass):
    """Writes out attention with dropout, on a CPU, where its parts may give 16 bits each."""

    name = "write out attention"

    def __call__(self, state: State) -> State:
        """The state with what was written out."""
        if MATH_ATTENTION not in self.policy.recompose or not _rounds_parts(self.policy, state):
            return state
        found = write_out_attention(state.graph, self.policy.category)
        return state.with_recomposed((*state.recomposed, *found)) if found else state


class RecomputeAttention(Pass):
    """Takes this package's operator for attention of few tokens, on a CPU, where its parts may give 16 bits each."""

    name = "recompute attention"

    def __call__(self, state: State) -> State:
        """The state with what was replaced."""
        if SHORT_ATTENTION not in self.policy.recompose or not _rounds_parts(self.policy, state):
            return state
        found = recompute_attention(state.graph, self.policy.category)
        return state.with_recomposed((*state.recomposed, *found)) if found else state


def _rounds_parts(policy: Policy, state: State) -> bool:
    """True where the list lets the parts of attention on a CPU give 16 bits each; float16 does not hold all scores."""
    is_kernel = policy.fold == "kernel" and policy.low == torch.bfloat16
    if not is_kernel or policy.device != "cpu" or state.guesses is not None:
        return False
    rules = {op: policy.op_list.rule(op, policy.device) for op in _PARTS}
    categories = {op: policy.op_list.unlisted if rule is None else rule.category for op, rule in rules.items()}
    return categories["matmul"] is Category.ALLOW and not {Category.BAN, Category.KEEP} & {*categories.values()}
