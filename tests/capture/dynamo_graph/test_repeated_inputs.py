"""A graph has an input for each tensor argument, whatever the example gives for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from tests.helpers import Net


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept = torch.randn(3, 4)  # neither a parameter nor a buffer

    def forward(self, q: Tensor, kv: Tensor, more: dict[str, Tensor] | None = None) -> Tensor:
        result = self.queries(q) - self.keys(kv) + self.kept
        return result if more is None else result + 3 * more["a"] + more["b"]


X, Y, Z = (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
OTHERS: tuple[tuple[Any, ...], ...] = ((Y, Z), (Z, Y), (Y, Y))


def _own(model: Two) -> tuple[Any, ...]:
    return X, model.kept


def _in_a_dict(model: Two) -> tuple[Any, ...]:
    return X, X, {"a": X, "b": X}


@pytest.mark.parametrize(
    "example", [lambda model: (X, X), lambda model: (X, X[:]), _own, lambda model: (X.requires_grad_(), X), _in_a_dict]
)
def test_arguments_are_told_apart(example: Callable[[Two], tuple[Any, ...]]) -> None:
    model = Two()
    given = example(model)
    amp_model = autocastfx.convert(model, given, op_list="float32")
    for call in OTHERS:
        more = () if len(given) == 2 else ({"a": call[1], "b": call[0]},)
        torch.testing.assert_close(amp_model(*call, *more), model(*call, *more), rtol=0, atol=0)


def test_the_first_call_tells_them_apart() -> None:
    model = Two()
    amp_model = autocastfx.convert(model, op_list="float32")
    amp_model(X, X)
    for call in OTHERS:
        torch.testing.assert_close(amp_model(*call), model(*call), rtol=0, atol=0)
    assert len(amp_model.variants) <= 1 + len(OTHERS)


def test_a_parameter_of_the_model_may_be_an_argument() -> None:
    model = Net(lambda m, x, weight: x @ m.weight + x @ weight, weight=nn.Parameter(torch.randn(4, 4)))
    amp_model = autocastfx.convert(model, (X, model.weight), op_list="float32")
    other = torch.randn(4, 4)
    torch.testing.assert_close(amp_model(Y, other), model(Y, other), rtol=0, atol=0)


def test_labels_that_were_the_ids_are_labels() -> None:
    """As language models are called everywhere: ``model(input_ids=ids, labels=ids)``."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids, labels = (torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    amp_model = autocastfx.convert(model, {"input_ids": ids, "labels": ids}, op_list="float32").eval()
    expected = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(amp_model(input_ids=ids, labels=labels).loss, expected)
    assert not torch.isclose(expected, model(input_ids=ids, labels=ids).loss)
