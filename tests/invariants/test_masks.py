"""Masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autocastfx.plan.plan import Precision
from tests.invariants.pair import HUGE, LOW, NEGATIVE, Net, Pair, attention, distance

pytestmark = [pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")]


def _attend(m: Net, x: Tensor, biased: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(torch.softmax(biased(q @ k.mT / 2), -1) @ v)


def _sdpa(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), attn_mask=mask))


def _baddbmm(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(torch.softmax(torch.baddbmm(mask, q, k.mT, alpha=0.5), -1) @ v)


def _in_place(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    def biased(scores: Tensor) -> Tensor:
        scores += mask
        return scores

    return _attend(m, x, biased)


def _assigned(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    def biased(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[mask < 0] = NEGATIVE
        return scores

    return _attend(m, x, biased)


ADDITIVE: dict[str, Callable[..., Tensor]] = {
    "add": lambda m, x, mask: _attend(m, x, lambda s: s + mask),
    "right add": lambda m, x, mask: _attend(m, x, lambda s: mask + s),
    "subtract": lambda m, x, mask: _attend(m, x, lambda s: s - (-mask)),
    "added in halves": lambda m, x, mask: _attend(m, x, lambda s: s + mask / 2 + mask / 2),
    "add in place": _in_place,
    "to dtype": lambda m, x, mask: _attend(m, x, lambda s: s + mask.to(s.dtype)),
    "sliced copy": lambda m, x, mask: _attend(m, x, lambda s: s + mask[:, : x.shape[1]].clone().contiguous()),
    "joined": lambda m, x, mask: _attend(m, x, lambda s: s + torch.cat([mask[:, :1], mask[:, 1:]], 1)),
    "expanded": lambda m, x, mask: _attend(m, x, lambda s: (s[:, None] + mask[:, None].expand(-1, 2, -1, -1))[:, 0]),
    "scaled": lambda m, x, mask: _attend(m, x, lambda s: s + mask * 1.0),
    "clamped": lambda m, x, mask: _attend(m, x, lambda s: torch.clamp(s + mask, min=NEGATIVE)),
    "max": lambda m, x, mask: _attend(m, x, lambda s: torch.max(s + mask, torch.tensor(NEGATIVE))),
    "baddbmm": _baddbmm,
    "inverted": lambda m, x, mask: _attend(m, x, lambda s: s + (1.0 - (mask == 0).float()) * NEGATIVE),
}


FILLED: dict[str, Callable[..., Tensor]] = {
    "masked_fill": lambda m, x, mask: _attend(m, x, lambda s: s.masked_fill(mask < 0, NEGATIVE)),
    "masked_fill_": lambda m, x, mask: _attend(m, x, lambda s: s.masked_fill_(mask < 0, NEGATIVE)),
    "where number": lambda m, x, mask: _attend(m, x, lambda s: torch.where(mask < 0, NEGATIVE, s)),
    "where 0-d": lambda m, x, mask: _attend(m, x, lambda s: torch.where(mask < 0, torch.full((), NEGATIVE), s)),
    "where full_like": lambda m, x, mask: _attend(
        m, x, lambda s: torch.where(mask < 0, torch.full_like(s, NEGATIVE), s)
    ),
    "assigned": _assigned,
    "triangle": lambda m, x, mask: _attend(m, x, lambda s: s + torch.triu(torch.full((8, 8), NEGATIVE), 1)),
    "constant": lambda m, x, mask: _attend(m, x, lambda s: s + torch.tensor([0.0, HUGE] + [0.0] * 6)),
}


def padding(value: float, *, whole_row: bool) -> Tensor:
    """A mask over (2, 8, 8) scores: the last key is hidden; in one row all keys are, if asked for."""
    mask = torch.zeros(2, 8, 8)
    mask[:, :, -1] = value
    if whole_row:
        mask[0, 1, :] = value
    return mask


def _compare_forms(pair: Pair, *call: Any) -> None:
    """As ``Pair.agree``, each form named where it fails."""
    found, expected = pair.amp_model(*call), pair.eager(*call)
    bound = pair.bound(call)
    wrong = {name: distance(found[name], expected[name]) for name in expected}
    assert {name: gap for name, gap in wrong.items() if not gap <= bound} == {}, f"allowed {bound:.3g}"
    for name in expected:
        pair.original.zero_grad()
        pair.amp_model(*call)[name].sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in pair.original.parameters()), name


@pytest.mark.parametrize("low", LOW)
def test_additive_masks_as_inputs_give_no_nan(low: torch.dtype) -> None:
    x = torch.randn(2, 8, 8)
    pair = Pair.of(attention(ADDITIVE), (x, torch.zeros(2, 8, 8)), low)
    for value in (HUGE, NEGATIVE, -1e9):
        _compare_forms(pair, x, padding(value, whole_row=True))
    _compare_forms(pair, x, padding(-1e4, whole_row=False))


@pytest.mark.parametrize("low", LOW)
def test_additive_masks_as_buffers_give_no_nan(low: torch.dtype) -> None:
    x = torch.randn(2, 8, 8)
    model = attention(ADDITIVE)
    model.register_buffer("mask", padding(HUGE, whole_row=True), persistent=low is torch.float16)
    _compare_forms(Pair.of(model, (x,), low), x)


@pytest.mark.parametrize("low", LOW)
def test_filled_masks_and_constants_give_no_nan(low: torch.dtype) -> None:
    x, mask = torch.randn(2, 8, 8), padding(-1.0, whole_row=True)
    _compare_forms(Pair.of(attention(FILLED), (x, mask), low), x, mask)


HIDDEN: dict[str, Callable[..., Tensor]] = {
    "added": lambda m, x, keep: _attend(m, x, lambda s: s + torch.where(keep, m.bias, HUGE)),
    "subtracted": lambda m, x, keep: _attend(m, x, lambda s: s - torch.where(keep, m.bias, -HUGE)),
    "masked_fill": lambda m, x, keep: _attend(m, x, lambda s: (s + m.bias).masked_fill(~keep, HUGE)),
    "where": lambda m, x, keep: _attend(m, x, lambda s: torch.where(~keep, NEGATIVE, s + m.bias)),
    "twice": lambda m, x, keep: _attend(
        m, x, lambda s: torch.where(keep, s + m.bias, HUGE).masked_fill(keep.tril(-1), HUGE)
    ),
    "logarithms": lambda m, x, keep: _attend(m, x, lambda s: torch.where(keep, s, HUGE).log_softmax(-1).exp()),
    "two readers": lambda m, x, keep: (lambda mask: _attend(m, x, lambda s: s + mask) + mask.relu().mean())(
        torch.where(keep, m.bias, NEGATIVE)
    ),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("fold", ["exact", "kernel"])
def test_numbers_that_hide_scores_hide_them_in_16_bits(fold: str, low: torch.dtype) -> None:
    """A row without a key is uniform, as in float32, and a bias under the mask has its gradient.

    The bias is a parameter, which by default makes scores float32, as under torch.autocast.
    """
    x, keep = torch.randn(2, 8, 8), padding(-1.0, whole_row=True) == 0
    model = attention(HIDDEN)
    model.bias = nn.Parameter(torch.randn(8, 8))
    pair = Pair.of(model, (x, keep), low, fold=fold)
    fills = [n for n in pair.amp_model.plan.nodes if "only hides scores" in n.decision.reason]
    assert {n.placement.run for n in fills} <= {Precision.LOW if fold == "kernel" else Precision.FLOAT32}
    expected = len(HIDDEN) - 1 if low is torch.bfloat16 else 0  # one form has two, and two have another reader
    assert len(fills) == expected
    pair.agree(x, keep)


def test_numbers_that_hide_scores_hide_them_in_attention() -> None:
    low = torch.bfloat16
    x, keep = torch.randn(2, 8, 8), padding(-1.0, whole_row=True) == 0
    model = attention({"sdpa": lambda m, x, keep: _sdpa(m, x, torch.where(keep, m.bias, HUGE).contiguous())})
    model.bias = nn.Parameter(torch.randn(8, 8))
    pair = Pair.of(model, (x, keep), low)
    assert not any(cast.saturates for cast in pair.amp_model.plan.casts if cast.value in ("where", "contiguous"))
    assert pair.amp_model.plan["where"].placement.run is Precision.LOW
    pair.agree(x, keep)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("held", [False, True])
def test_masks_through_scaled_dot_product_attention_give_no_nan(held: bool, low: torch.dtype) -> None:
    x, mask = torch.randn(2, 8, 8), padding(HUGE, whole_row=False)
    call = (x,) if held else (x, mask)
    _compare_forms(Pair.of(attention({"sdpa": _sdpa}, **({"mask": mask} if held else {})), call, low), *call)


@pytest.mark.parametrize("low", LOW)
def test_rows_without_a_key_in_scaled_dot_product_attention_give_no_nan(low: torch.dtype) -> None:
    """In float16 such a row is finite, but no plain average: no finite mask there hides the scores altogether."""
    x, mask = torch.randn(2, 8, 8), padding(HUGE, whole_row=True)
    pair = Pair.of(attention({"sdpa": _sdpa}), (x, mask), low)
    if low is torch.float16:
        assert pair.amp_model(x, mask)["sdpa"].isfinite().all()
    else:
        _compare_forms(pair, x, mask)


@pytest.mark.parametrize("low", LOW)
def test_a_mask_made_inside_goes_through_scaled_dot_product_attention(low: torch.dtype) -> None:
    def made(m: Net, x: Tensor, mask: Tensor) -> Tensor:
        keep = torch.ones(8, 8, dtype=torch.bool).tril()
        inner = torch.zeros(8, 8).masked_fill(~keep, NEGATIVE)
        return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), attn_mask=inner))

    def boolean(m: Net, x: Tensor, mask: Tensor) -> Tensor:
        return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), attn_mask=mask == 0))

    def causal(m: Net, x: Tensor, mask: Tensor) -> Tensor:
        return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), is_causal=True))

    x, mask = torch.randn(2, 8, 8), padding(-1.0, whole_row=False)
    forms = {"made": made, "boolean": boolean, "causal": causal}
    _compare_forms(Pair.of(attention(forms), (x, mask), low), x, mask)


@pytest.mark.parametrize("low", LOW)
def test_infinite_masks_stay_infinite(low: torch.dtype) -> None:
    """A row without any key is NaN in the original, so it is here, and no other is."""
    forms = {k: ADDITIVE[k] for k in ("add", "right add", "add in place", "sliced copy", "baddbmm")}
    forms["fill"] = lambda m, x, mask: _attend(m, x, lambda s: s.masked_fill(mask < 0, -math.inf))
    forms["scores"] = lambda m, x, mask: m.qkv(x)[..., :8] + mask
    x = torch.randn(2, 8, 8)
    pair = Pair.of(attention(forms), (x, torch.zeros(2, 8, 8)), low)
    for whole_row in (False, True):
        mask = padding(-math.inf, whole_row=whole_row)
        found, expected = pair.amp_model(x, mask), pair.eager(x, mask)
        for name in forms:
            assert distance(found[name], expected[name]) <= pair.bound((x, mask)), name
        assert found["scores"].isneginf().sum() == mask.isneginf().sum() > 0
        assert found["add"].isnan().any() == whole_row


@pytest.mark.parametrize("low", LOW)
def test_masks_of_torchs_own_attention_modules(low: torch.dtype) -> None:
    x, keys = torch.randn(2, 8, 8), torch.tensor([[0.0] * 8, [0.0] * 7 + [-math.inf]])
    model = Net(
        lambda m, x, mask, keys: (
            m.attend(x, x, x, attn_mask=mask, key_padding_mask=keys)[0],
            m.layer(x, src_mask=mask, src_key_padding_mask=keys),
        ),
        attend=nn.MultiheadAttention(8, 2, batch_first=True),
        layer=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu"),
    )
    mask = padding(-math.inf, whole_row=False)[0]
    pair = Pair.of(model, (x, mask, keys), low)
    for mode in (True, False):
        pair.train(mode).agree(x, mask, keys)
