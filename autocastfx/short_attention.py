"""The operator ``autocastfx::scaled_dot_product_attention``: torch's, of which backward computes the weights anew.

On a CPU torch's fused attention takes its time where sequences are short: its backward computes tiles one by one, which
few tokens do not fill. Plain products of all tokens are faster there, up to three times. This operator keeps what
torch's keeps or less: query, key and value, from which backward computes the weights once more. Elsewhere (another
device, dtype or size, dropout, a mask to be learned, nothing to differentiate, a compiler) it is torch's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["TOKENS", "short_attention"]

aten: Any = torch.ops.aten
TOKENS = 160  # of queries, and of keys: what is gained shrinks with more (python -m benchmarks.short_attention)

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define(str(aten.scaled_dot_product_attention.default._schema).removeprefix("aten::"))


class _Recomputed(torch.autograd.Function):
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
        query, key, values, gradient = (t.reshape(-1, *t.shape[-2:]) for t in (*given, gradients[0]))
        scale = 1 / math.sqrt(query.shape[-1]) if ctx.scale is None else ctx.scale
        scores = _scaled(query, key.mT, scale).view(*given[0].shape[:2], query.shape[1], key.shape[1])
        weights = _weights(scores, mask, ctx.is_causal).view(-1, *scores.shape[2:])
        found = [None, None, weights.mT @ gradient if of_values else None]
        if of_query or of_key:
            of_weights = gradient @ values.mT
            of_scores = aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            found[0] = _scaled(of_scores, key, scale) if of_query else None
            found[1] = _scaled(of_scores.mT, query, scale) if of_key else None
        own = (None if t is None else t.view(like.shape) for t, like in zip(found, given, strict=True))
        return (*own, None, None, None)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """``scale * left @ right`` of batches of matrices, rounded once."""
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _weights(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The softmax of ``scores``, which are written over, without what is hidden."""
    if is_causal:
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill_(later, -math.inf).softmax(-1)
    if mask is None:
        return scores.softmax(-1)
    hidden = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    weights: Tensor = aten._safe_softmax(hidden, -1)  # a mask may hide all of a row
    return weights


def _torchs(*args: Any, **kwargs: Any) -> Tensor:
    found: Tensor = aten.scaled_dot_product_attention.default(*args, **kwargs)
    return found


def _is_short(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether torch's would be the fused one, and the formula is faster in backward."""
    if mask is not None and (is_causal or mask.requires_grad):
        return False
    if type(query) is not Tensor or torch.compiler.is_compiling() or get_proxy_mode() is not None:
        return False
    if not (query.device.type == "cpu" and query.dtype == key.dtype == values.dtype == torch.bfloat16):
        return False
    is_plain = query.ndim == key.ndim == values.ndim == 4 and query.shape[:2] == key.shape[:2] == values.shape[:2]
    return is_plain and 0 < query.shape[-2] <= TOKENS and 0 < key.shape[-2] <= TOKENS


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
    transforms = torch._C._are_functorch_transforms_active()  # they take no autograd function here
    is_other = transforms or dropout_p or enable_gqa or not differentiates
    if is_other or not _is_short(query, key, values, attn_mask, is_causal):
        return _torchs(query, key, values, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    result: Tensor = _Recomputed.apply(query, key, values, attn_mask, is_causal, scale)
    return result


_LIBRARY.impl("scaled_dot_product_attention", _with_autograd, "Autograd")
_LIBRARY.impl("scaled_dot_product_attention", _torchs, "CompositeExplicitAutograd")

short_attention = torch.ops.autocastfx.scaled_dot_product_attention.default
