"""Attention on CUDA reads keys and values that heads share, where the model copies them for each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx

TIMES = 4


def _repeat_kv(x: Tensor) -> Tensor:
    """As transformers copies heads."""
    batch, heads, length, size = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, TIMES, length, size)
    return x.reshape(batch, heads * TIMES, length, size)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_kv": _repeat_kv,
    "cloned": lambda x: x.unsqueeze(2).expand(-1, -1, TIMES, -1, -1).contiguous().view(x.shape[0], -1, *x.shape[2:]),
    "repeat_interleave": lambda x: x.repeat_interleave(TIMES, dim=-3),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "other order": lambda x: x.repeat(1, TIMES, 1, 1),
    "other order, expanded": lambda x: (
        x.unsqueeze(1).expand(-1, TIMES, -1, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])
    ),
    "scaled": lambda x: _repeat_kv(x) * 2,
}


class Grouped(nn.Module):
    """Attention of 8 heads, which share two keys and values."""

    def __init__(self, copy: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 16), nn.Linear(32, 16)
        self.copy, self.options = copy, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, self.copy(k), self.copy(v), **self.options)


def converted(model: nn.Module, x: Tensor, **options: Any) -> Any:
    return autocastfx.convert(model, x, **{"dtype": "bfloat16", "device": "cuda", "check": False, **options})


def results(model: Any, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    model.zero_grad()
    made = model(x)
    made.float().square().sum().backward()
    return [made.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_shared_heads_are_read_as_they_are(copy: Callable[[Tensor], Tensor], training: bool, x: Tensor) -> None:
    """Nothing is copied, and output and gradients are those of the copies, but for the order of sums."""
    model = Grouped(copy, is_causal=True).train(training)
    amp, plain = converted(model, x), converted(model, x, recompose=False)
    assert [one.pattern for one in amp.plan.recomposed] == ["grouped_attention"]
    assert "grouped_attention" in autocastfx.explain(amp, "scaled_dot_product_attention")
    assert not any(word in str(amp.graph) for word in ("expand", "repeat_interleave"))
    others = results(plain, x)
    largest = max(float(other.abs().max()) for other in others)  # the gradient of k's bias is nothing but rounding
    for ours, other in zip(results(amp, x), others, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=torch.finfo(torch.bfloat16).eps * largest)


def _written(x: Tensor) -> Tensor:
    copied = _repeat_kv(x)
    copied[:, 0] = 1.0
    return copied


STAY: dict[str, tuple[Grouped, dict[str, Any]]] = {
    **{name: (Grouped(copy), {}) for name, copy in OTHERS.items()},
    "written into": (Grouped(_written), {}),
    "a mask": (Grouped(_repeat_kv, attn_mask=torch.zeros(16, 16)), {}),
    "for a CPU": (Grouped(_repeat_kv), {"device": "cpu"}),
    "not asked for": (Grouped(_repeat_kv), {"recompose": ["silu"]}),
    "float32": (Grouped(_repeat_kv), {"op_list": "float32"}),
}


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name: str, x: Tensor) -> None:
    """Another order of heads, a mask, a value that is written into, and attention in float32."""
    model, options = STAY[name]
    amp = converted(model, x, **options)
    assert "grouped_attention" not in {one.pattern for one in amp.plan.recomposed}
    for ours, other in zip(
        results(amp, x), results(converted(model, x, **{"recompose": False, **options}), x), strict=True
    ):
        assert torch.equal(ours, other)


def test_what_else_reads_the_copies_keeps_them(x: Tensor) -> None:
    class Cached(Grouped):
        def forward(self, x: Tensor) -> Any:
            q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            copied = _repeat_kv(k)
            return F.scaled_dot_product_attention(q, copied, _repeat_kv(v)), copied

    assert not converted(Cached(_repeat_kv), x).plan.recomposed


def test_keys_that_are_the_values_too_are_dropped_once(x: Tensor) -> None:
    class Tied(Grouped):
        def forward(self, x: Tensor) -> Tensor:
            q, k = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k))
            copied = _repeat_kv(k)
            return F.scaled_dot_product_attention(q, copied, copied)

    amp = converted(Tied(_repeat_kv), x)
    assert [one.pattern for one in amp.plan.recomposed] == ["grouped_attention"]
    torch.testing.assert_close(amp(x), converted(Tied(_repeat_kv), x, recompose=False)(x), rtol=0, atol=2.0**-7)
