"""Attention that is written out is one operator where it gives the same, and only there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import autocastfx
from autocastfx.graph.node import attributes_of
from autocastfx.passes.patterns.patterns import PATTERNS, chosen
from autocastfx.passes.recompose import recompose
from tests.helpers import Function, relative_error, saved_bytes, unchecked
from tests.passes.patterns.test_patterns import recomposed, with_gradients

EPS = torch.finfo(torch.float32).eps
LOWEST = torch.finfo(torch.float32).min
ATTENTION = ("attention", "masked_attention")


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(2, 3) * 0.5, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.dropout(weights, 0.0, True) @ v


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1), v)


def masked(q: Tensor, k: Tensor, v: Tensor, lowest: float, diagonal: int) -> Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(diagonal)
    mask = torch.where(seen[None, None], torch.zeros(1, 1, q.shape[2], k.shape[2]), lowest)
    return torch.softmax(q @ k.transpose(2, 3) * 0.5 + mask, -1, dtype=torch.float32) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(q, k, v, LOWEST, 0)


def from_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(1, 1, q.shape[2], k.shape[2]) * LOWEST
    mask = torch.where(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None], 0.0, hidden)
    return torch.softmax(q @ k.transpose(2, 3) * 0.5 + mask, -1, dtype=torch.float32) @ v


WRITTEN = {"attention": (eager, divided, plain), "masked_attention": (causal, from_ones)}
CASES = [(name, function) for name, functions in WRITTEN.items() for function in functions]
IDS = [function.__name__ for _, function in CASES]


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 3, 32, 8) for _ in range(3))


@pytest.mark.parametrize(("name", "function"), CASES, ids=IDS)
def test_numbers_and_gradients_are_those_written_out(name: str, function: Callable[..., Tensor]) -> None:
    given = inputs()
    module, found = recomposed(function, *given)
    assert found == [name]
    assert recompose(module.graph, PATTERNS, lambda node: (), attributes_of(module, module.graph)) == ()
    for before, after in zip(with_gradients(function, *given), with_gradients(module, *given), strict=True):
        assert not after.isnan().any()
        # Sums of 32 and of 8 terms follow each other, in another order in each.
        assert (after - before).abs().max() <= 40 * EPS * before.abs().max().clamp_min(1)
    leaves = [t.requires_grad_() for t in given]
    assert saved_bytes(lambda: module(*leaves)) < saved_bytes(lambda: function(*leaves))


def test_a_row_that_is_masked_whole_has_the_same_result_and_no_nan() -> None:
    given = inputs()
    module, found = recomposed(lambda q, k, v: masked(q, k, v, LOWEST, -2), *given)
    assert found == ["masked_attention"]
    before, after = (with_gradients(f, *given) for f in (lambda *t: masked(*t, LOWEST, -2), module))
    assert (after[0] - before[0]).abs().max() <= 40 * EPS * before[0].abs().max()
    assert all(gradient.isfinite().all() for gradient in after)  # but they are the operator's own in such a row
    assert not torch.allclose(after[3], before[3]), "the gradients agree: the warning in the documentation can go"


def weights_too(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = torch.softmax(q @ k.transpose(2, 3), -1)
    return weights @ v, weights


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v).view(6, 32, 8)


def given_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(2, 3) + v[..., :1], -1) @ v


NOT_QUITE: dict[str, Callable[..., Any]] = {
    "the weights are given back": weights_too,
    "dropout is on": lambda q, k, v: torch.dropout(torch.softmax(q @ k.transpose(2, 3), -1), 0.1, True) @ v,
    "softmax over the queries": lambda q, k, v: torch.softmax(q @ k.transpose(2, 3), -2) @ v,
    "other dimensions are swapped": lambda q, k, v: torch.softmax(q @ k.transpose(3, 3).transpose(2, 3), 1) @ v,
    "one head for all": lambda q, k, v: plain(q, k[:, :1], v[:, :1]),
    "three dimensions": lambda q, k, v: plain(q[0], k[0], v[0]),
    "a mask of -inf": lambda q, k, v: masked(q, k, v, -math.inf, 0),
    "a mask that is not made here": given_mask,
    "the result is viewed": viewed,
}


def by_number(shown: float, hidden: float) -> Callable[..., Tensor]:
    """Masked by constants, as ``torch.tensor`` makes them."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
        mask = torch.where(seen, torch.tensor(shown), torch.tensor([hidden, LOWEST])[0])
        return torch.softmax(q @ k.transpose(2, 3) * 0.5 + mask, -1) @ v

    return attend


def written_into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(1, 1, q.shape[2], k.shape[2])
    bias[..., 0] = -math.inf
    return torch.softmax(q @ k.transpose(2, 3) + bias * 1.0, -1) @ v


@unchecked
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (by_number(0.0, LOWEST), ["masked_attention"]),
        (by_number(1.0, -1e4), ["masked_attention"]),
        (by_number(0.0, -math.inf), []),
        (by_number(math.nan, LOWEST), []),
        (written_into, []),
    ],
)
def test_a_mask_of_constants_is_made_of_their_numbers(function: Callable[..., Tensor], found: list[str]) -> None:
    amp_model = autocastfx.convert(Function(function), inputs(), dtype=torch.bfloat16, recompose=ATTENTION)
    assert [one.pattern for one in amp_model.plan.recomposed] == found
    assert relative_error(amp_model(*inputs()), function(*inputs())) < 8 * torch.finfo(torch.bfloat16).eps or not found


@pytest.mark.parametrize("name", NOT_QUITE)
def test_what_is_not_quite_it_stays(name: str) -> None:
    _, found = recomposed(NOT_QUITE[name], *inputs())
    assert found == []


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(vocab_size=32, max_position_embeddings=64, **SIZES, attn_implementation="eager")
    return transformers.BertModel(config)


def llama() -> torch.nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = transformers.LlamaConfig(vocab_size=32, **sizes, use_cache=False, attn_implementation="eager")
    return transformers.LlamaModel(config)


@pytest.mark.parametrize("make", [bert, llama])
def test_models_are_as_near_to_float32_as_before_and_keep_less(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model, padding = make().eval(), torch.ones(2, 32, dtype=torch.long)
    padding[0, :9] = padding[1, 20:] = 0  # with causality, the first rows see nothing at all
    given = {"input_ids": torch.randint(0, 32, (2, 32)), "attention_mask": padding}
    by_name, usual = (
        autocastfx.convert(model, (), given, dtype=torch.bfloat16, recompose=names)
        for names in ((*chosen(True), *ATTENTION), True)
    )
    assert [r.pattern for r in by_name.plan.recomposed].count("masked_attention") == 1
    assert not {r.pattern for r in usual.plan.recomposed} & set(ATTENTION)
    exact, found, before = (m(**given).last_hidden_state.detach() for m in (model, by_name, usual))
    assert relative_error(found, exact) <= 1.25 * relative_error(before, exact)
    kept = [saved_bytes(lambda m=m: m(**given).last_hidden_state) for m in (by_name, usual)]
    assert kept[0] < kept[1]


def test_in_float16_masked_attention_stays() -> None:
    given = {"input_ids": torch.randint(0, 32, (2, 32)), "attention_mask": torch.ones(2, 32, dtype=torch.long)}
    model = autocastfx.convert(bert().eval(), (), given, dtype=torch.float16, recompose=ATTENTION, check=False)
    assert model.plan.recomposed == ()
