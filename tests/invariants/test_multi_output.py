"""Multi-output ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.helpers import TORCH
from tests.invariants.pair import LOW, Net, Pair, net

pytestmark = [pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")]


def _parts(m: Net, x: Tensor) -> Any:
    y = m.a(x)
    first, second = y.split(8, -1)
    third, fourth = y.chunk(2, -1)
    rows = y.unbind(0)
    return {
        "split": m.c(first),
        "rest": [second, third, m.c(fourth)],
        "rows": m.b(rows[0]),
        "sizes": y.split([1, 15], 1),
    }


def _ordered(m: Net, x: Tensor) -> Any:
    y = m.a(x)
    largest, where = y.max(-1)
    return {
        "topk": y.topk(2),
        "sort": y.sort(-1, descending=True),
        "max": (m.c(largest[:, None].expand(-1, 8)), where),
        "min": y.min(0),
        "median": y.median(-1),
        "kth": y.kthvalue(2),
        **({"aminmax": y.aminmax(dim=0)} if TORCH >= (2, 13) else {}),  # before, it had no derivative
        "unique": torch.unique_consecutive(where, return_counts=True),
    }


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("function", [_parts, _ordered])
def test_multi_output_ops(function: Callable[..., Any], low: torch.dtype) -> None:
    x = torch.randn(3, 8)
    Pair.of(net(function, a=nn.Linear(8, 16), b=nn.Linear(16, 8), c=nn.Linear(8, 8)), (x,), low).agree(x)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 8, batch_first=True, **options)
        self.out = nn.Linear(16 if options.get("bidirectional") else 8, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.rnn(x, state)
        return self.out(y), state


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Callable[..., nn.Module], low: torch.dtype) -> None:
    x = torch.randn(2, 5, 8)
    pair = Pair.of(Recurrent(kind, bidirectional=kind is nn.LSTM), (x,), low)
    _, state = pair.eager(x)
    pair.agree(x)
    pair.agree(torch.randn(3, 2, 8))
    pair.agree(x, pytree.tree_map(torch.detach, state))
