"""The operator ``autocastfx::scaled_dot_product_attention``: torch's, with a faster backward for short sequences.

On a CPU the backward of torch's fused attention takes more than twice as long as plain matrix products if sequences are
short. This operator has torch's result, keeps query, key and value, and recomputes the attention weights in backward as
a model that writes attention out: in 16 bits, rounded after each product. It does so for bfloat16 and few tokens on a
CPU with AVX-512. In all other cases, and with dropout, with a mask that requires gradients, without gradients, and
while compiling, it calls torch's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autocastfx.runtime.operators.casts import is_concrete

aten: Any = torch.ops.aten
# Measured (benchmarks/results/answered.md): the gain shrinks with more queries and keys; with few scores the
# operators' overhead outweighs it.
TOKENS, _SCORES = 160, 2**13

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define(str(aten.scaled_dot_product_attention.default._schema).removeprefix("aten::"))


class _Recomputed(torch.autograd.Function):
    """Attention of which backward recomputes the weights.

    ``query`` has the shape (batch, heads, queries, size), ``key`` (batch, heads, keys, size), ``values`` (batch, heads,
    keys, any size). ``mask`` is boolean, or added to the scores; it gets no gradient. With ``is_causal`` there is none,
    and a query sees no later key. ``scale`` is the factor of the scores, not 0; by default 1 / sqrt(size).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, values, mask)
        ctx.is_causal, ctx.scale = is_causal, scale
        return _torchs(query, key, values, mask, 0.0, is_causal, scale=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if gradients[0] is None:
            return (None,) * 6
        *given, mask = ctx.saved_tensors
        of_query, of_key, of_values = ctx.needs_input_grad[:3]
        batch, heads = given[0].shape[:2]
        query, key, values, gradient = (t.reshape(batch * heads, *t.shape[2:]) for t in (*given, gradients[0]))
        scale = 1 / math.sqrt(query.shape[-1]) if ctx.scale is None else ctx.scale
        scores = _scaled(query, key.mT, scale)
        weights = _weights(scores.view(batch, heads, *scores.shape[1:]), mask, ctx.is_causal).view(scores.shape)
        flat_gradients = [None, None, weights.mT @ gradient if of_values else None]
        if of_query or of_key:
            of_weights = gradient @ values.mT
            of_scores = aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            flat_gradients[0] = _scaled(of_scores, key, scale) if of_query else None
            flat_gradients[1] = _scaled(of_scores.mT, query, scale) if of_key else None
        own = (None if t is None else t.view(like.shape) for t, like in zip(flat_gradients, given, strict=True))
        return (*own, None, None, None)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return ``scale * left @ right`` for batches of matrices, rounded once; ``scale`` is not 0."""
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _weights(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return the softmax of ``scores`` under the mask. Overwrites ``scores``."""
    if is_causal:
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill_(later, -math.inf).softmax(-1)
    if mask is None:
        return scores.softmax(-1)
    hidden = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    weights: Tensor = aten._safe_softmax(hidden, -1)  # a mask may hide a whole row
    return weights


def _torchs(*args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = aten.scaled_dot_product_attention.default(*args, **kwargs)
    return result


def _is_short(query: Tensor, key: Tensor, values: Tensor) -> bool:
    """True if torch would use its fused kernel and ``_Recomputed`` takes less time."""
    given = (query, key, values)
    if not all(is_concrete(t) and t.is_cpu and t.dtype == torch.bfloat16 and t.ndim == 4 for t in given):
        return False
    (*left, queries, size), (*right, keys, _) = query.shape, key.shape
    is_alike = left == right == [*values.shape[:2]] and size > 0
    is_few = max(queries, keys) <= TOKENS and math.prod(left) * queries * keys >= _SCORES
    return is_alike and is_few and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _with_autograd(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, values))
    transforms = torch._C._are_functorch_transforms_active()  # which cannot take this autograd function
    is_masked = attn_mask is not None and (is_causal or attn_mask.requires_grad)
    is_other = transforms or is_masked or dropout_p or scale == 0 or enable_gqa
    if differentiates and not is_other and _is_short(query, key, values):
        return _Recomputed.apply(query, key, values, attn_mask, is_causal, scale)
    return _torchs(query, key, values, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


_LIBRARY.impl("scaled_dot_product_attention", _with_autograd, "Autograd")
_LIBRARY.impl("scaled_dot_product_attention", _torchs, "CompositeExplicitAutograd")

short_attention = torch.ops.autocastfx.scaled_dot_product_attention.default
