"""Same seed, same dropout mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.invariants.pair import LOW, Net, Pair, net

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


RANDOM: dict[str, Callable[..., Any]] = {
    "dropout": lambda m, x: F.dropout(m.a(x), 0.5, m.training),
    "dropout between": lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.training)),
    "feature dropout": lambda m, x: F.dropout2d(m.a(x)[None, :, :, None], 0.5, m.training),
    "alpha dropout": lambda m, x: F.alpha_dropout(m.a(x), 0.5, m.training),
    "two": lambda m, x: F.dropout(m.b(F.dropout(m.a(x), 0.2, m.training)), 0.7, m.training),
    "after noise": lambda m, x: F.dropout(m.a(x) + torch.randn(8) * torch.rand_like(x), 0.5, m.training),
    "attention": lambda m, x: F.scaled_dot_product_attention(*m.a(x)[None].expand(3, -1, -1, -1), dropout_p=0.5),
}


@pytest.mark.parametrize("low", LOW)
def test_the_same_seed_gives_the_same_dropout_mask(low: torch.dtype) -> None:
    x = torch.randn(16, 8)
    pair = Pair.of(net(lambda m, x: {name: make(m, x) for name, make in RANDOM.items()}), (x,), low)
    for seed in (0, 1):
        found, expected = pair.agree(x, seed=seed)
        for name in RANDOM:
            assert torch.equal(found[name] == 0, expected[name] == 0), name
    again = pair.amp_model(x)
    assert all(not torch.equal(again[name], found[name]) for name in RANDOM), "another state gives another mask"
    assert (found["dropout"] == 0).any()


def test_the_same_seed_gives_the_same_mask_inside_an_lstm() -> None:
    x = torch.randn(2, 5, 8)
    model = Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True))
    Pair.of(model, (x,), torch.float16).agree(x)


WHOLE: dict[str, Callable[..., Any]] = {
    "of nothing": lambda x: F.dropout(x, 0.0, True),
    "of no channels": lambda x: F.dropout1d(x, 0.0, True),
    "of a module": nn.Dropout(0.0),
    "in evaluation": lambda x: F.dropout(x, 0.5, False),
}


@pytest.mark.parametrize("name", WHOLE)
def test_dropout_that_leaves_all_is_its_input_where_it_is_written_into(name: str) -> None:
    def forward(m: Net, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = m.a(x)
        left = WHOLE[name](hidden)
        left += x
        return m.b(hidden), m.b(left), hidden

    x = torch.randn(4, 8)
    Pair.of(net(forward), (x,), torch.bfloat16).agree(x)
