"""Cases with masks at the edge of float32, hand-written attention, norms and activations, and float32 islands."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.hand.case import WIDTH, case, linears, masked, rows

LOWEST = torch.finfo(torch.float32).min
_QKV = linears("q", "k", "v")


def _scores(self: Any, x: Tensor) -> Tensor:
    return self.q(x) @ self.k(x).mT / WIDTH**0.5


def masked_fill_lowest(self: Any, x: Tensor, there: Tensor) -> Tensor:
    scores = _scores(self, x)
    return scores.masked_fill(~there[:, None], torch.finfo(scores.dtype).min).softmax(-1) @ self.v(x)


def where_lowest(self: Any, x: Tensor, there: Tensor) -> Tensor:
    return torch.where(there[:, None], _scores(self, x), torch.tensor(-3.4e38)).softmax(-1) @ self.v(x)


def masked_fill_infinite(self: Any, x: Tensor) -> Tensor:
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return _scores(self, x).masked_fill(later, float("-inf")).softmax(-1) @ self.v(x)


def added_lowest(self: Any, x: Tensor, there: Tensor) -> Tensor:
    return (_scores(self, x) + (1.0 - there[:, None].float()) * LOWEST).softmax(-1) @ self.v(x)


def added_from_outside(self: Any, x: Tensor, bias: Tensor) -> Tensor:
    return (_scores(self, x) + bias).softmax(-1) @ self.v(x)


def whole_row_masked(self: Any, x: Tensor, there: Tensor) -> Tensor:
    none = there & (torch.arange(x.shape[0]) > 0)[:, None]  # the first of the batch sees nothing: a mean over all
    return (_scores(self, x) + (~none[:, None]).float() * LOWEST).clamp(min=LOWEST).softmax(-1) @ self.v(x)


def fused_bool_mask(self: Any, x: Tensor, there: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=there[:, None])


def fused_float_mask(self: Any, x: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=bias)


def fused_causal(self: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True, dropout_p=0.0)


def multihead_attention(self: Any, x: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    return self.attention(x, x, x, key_padding_mask=~there)


def encoder_layer(self: Any, x: Tensor, there: Tensor) -> Tensor:
    return self.layer(x, src_key_padding_mask=~there)


def float_island(self: Any, x: Tensor) -> Tensor:
    low = self.a(x)
    return self.b((low.float() * 1e-3).softmax(-1).type_as(low))


def island_to_dtype(self: Any, x: Tensor) -> Tensor:
    low = self.a(x)
    return self.b(low.to(torch.float32).exp().log1p().to(low.dtype))


def softmax_in_float32(self: Any, x: Tensor) -> Tensor:
    low = self.a(x)
    return self.b(F.softmax(low, dim=-1, dtype=torch.float32).to(low.dtype))


def rms_norm_by_hand(self: Any, x: Tensor) -> Tensor:
    low = self.a(x)
    wide = low.to(torch.float32)
    return self.b(self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(low.dtype))


def layer_norm_by_hand(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    centred = y - y.mean(-1, keepdim=True)
    return self.b(self.weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt())


def softmax_by_hand(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) * 20
    powers = (y - y.amax(-1, keepdim=True)).exp()
    return self.b(powers / powers.sum(-1, keepdim=True))


def gelu_by_hand(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y.pow(3)))))


def region_without_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = self.a(x.float()).exp()
    return self.b(y)


def _bias(batch: int, size: int) -> dict[str, Any]:
    later = torch.ones(size, size).triu(1).expand(batch, -1, -1)
    return {**rows(batch, size), "bias": later * LOWEST}


_weight = linears("a", "b", weight=lambda: nn.Parameter(torch.rand(WIDTH) + 0.5))

CASES = (
    *(
        case(f, _QKV, masked)
        for f in (masked_fill_lowest, where_lowest, added_lowest, whole_row_masked, fused_bool_mask)
    ),
    *(case(f, _QKV) for f in (masked_fill_infinite, fused_causal)),
    *(case(f, _QKV, _bias) for f in (added_from_outside, fused_float_mask)),
    case(multihead_attention, linears(attention=partial(nn.MultiheadAttention, WIDTH, 4, batch_first=True)), masked),
    case(encoder_layer, linears(layer=partial(nn.TransformerEncoderLayer, WIDTH, 4, 32, batch_first=True)), masked),
    *(case(f) for f in (float_island, island_to_dtype, softmax_in_float32, softmax_by_hand, gelu_by_hand)),
    *(case(f, _weight) for f in (rms_norm_by_hand, layer_norm_by_hand)),
    case(region_without_autocast),
)
