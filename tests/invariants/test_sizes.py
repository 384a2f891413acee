"""Other sizes, other call structures and both modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autocastfx
from tests.invariants.pair import LOW, Features, Pair, net

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


class Shapely(nn.Module):
    """Python that looks at sizes: a branch, a loop over the length, an unrolled cell, a relation of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.cell, self.out = (nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTMCell(8, 8), nn.Linear(8, 8))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = torch.tanh(self.a(x)) if x.shape[0] > 3 else self.b(x) * 2
        if x.shape[1] == other.shape[0]:
            y = y + self.a(other)
        elif other.shape[0] == 1:
            y = y - self.b(other)
        else:
            y = y * other.shape[0] + self.a(other).mean(0)
        h = c = torch.zeros(x.shape[0], 8)
        steps = []
        for t in range(x.shape[1]):
            h, c = self.cell(y[:, t], (h, c))
            steps.append(self.drop(self.out(h)))
        return torch.stack(steps, 1) / x.shape[0]


@pytest.fixture(scope="module")
def shapely() -> Pair:
    return Pair.of(Shapely(), (torch.randn(2, 3, 8), torch.randn(3, 8)), torch.float16)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(batch=st.integers(1, 5), length=st.integers(1, 3), rows=st.integers(1, 3), mode=st.booleans())
def test_other_sizes_and_modes_give_the_originals_numbers(
    shapely: Pair, batch: int, length: int, rows: int, mode: bool
) -> None:
    shapely.train(mode).agree(torch.randn(batch, length, 8), torch.randn(rows, 8))


SIZES: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], ...]]]] = {
    "branch": (
        lambda m, x: m.a(x) if x.shape[0] > 3 else m.b(x) * 2 if x.shape[0] != 1 else m.b(m.a(x)),
        [((3, 8),), ((4, 8),), ((1, 8),), ((9, 8),), ((2, 8),)],
    ),
    "a batch of one first": (lambda m, x: m.b(m.a(x).tanh()), [((1, 8),), ((5, 8),), ((2, 8),)]),
    "an empty batch": (lambda m, x: m.b(m.a(x).tanh()), [((2, 8),), ((0, 8),), ((3, 8),)]),
    "broadcast": (
        lambda m, x, y: m.b(m.a(x) + y),
        [((3, 8), (3, 8)), ((3, 8), (1, 8)), ((1, 8), (3, 8)), ((3, 8), (3, 1)), ((3, 8), (8,)), ((1, 8), (1, 8))],
    ),
    "size in arithmetic": (
        lambda m, x: m.a(x) * x.shape[0] / 7.0 + math.sqrt(x.shape[-1]) + x.size(0) ** 2,
        [((3, 8),), ((5, 8),), ((1, 8),)],
    ),
    "size in a view": (
        lambda m, x: m.b(m.a(x).view(x.shape[0], -1, 2).flatten(1)).view(-1),
        [((3, 8),), ((5, 8),), ((1, 8),)],
    ),
    "number of dimensions": (
        lambda m, x: m.b(m.a(x).mean(0)) if x.ndim == 3 else m.a(x),
        [((3, 8),), ((2, 3, 8),), ((8,),), ((3, 8),)],
    ),
    "even or odd": (lambda m, x: m.a(x) if x.shape[0] % 2 else m.b(x), [((3, 8),), ((4, 8),), ((7, 8),), ((8, 8),)]),
    "pooled": (
        lambda m, x: m.b(F.adaptive_avg_pool1d(m.a(x).mT, 2).mT),
        [((2, 4, 8),), ((2, 6, 8),), ((1, 5, 8),)],
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_other_sizes_give_the_originals_numbers(name: str) -> None:
    function, sizes = SIZES[name]
    pair = Pair.of(net(function), tuple(torch.randn(s) for s in sizes[0]), torch.float16)
    for shapes in sizes:
        pair.agree(*(torch.randn(s) for s in shapes), backward=0 not in shapes[0])


def test_sizes_that_change_nothing_share_a_variant() -> None:
    amp_model = autocastfx.convert(net(lambda m, x: m.b(m.a(x).tanh())), (torch.randn(3, 8),), dtype="float16")
    for size in (1, 2, 7):
        amp_model(torch.randn(size, 8))
    assert len(amp_model.variants) == 2


@pytest.mark.parametrize("low", LOW)
def test_frozen_submodules_keep_their_mode(low: torch.dtype) -> None:
    model = Features().train()
    model.bn.eval()
    pair = Pair.of(model, (torch.randn(2, 3, 5, 5),), low)
    x = torch.randn(4, 3, 5, 5)

    def modes(of: nn.Module) -> dict[str, bool]:
        return {name: module.training for name, module in of.named_modules() if not name.startswith("_variants")}

    assert modes(pair.amp_model) == modes(model)
    pair.agree(x)
    assert pair.original.bn.num_batches_tracked == 0, "its statistics are used, not updated"
    pair.train(True).agree(x)
    assert pair.original.bn.num_batches_tracked == 1
    pair.amp_model.bn.eval()
    pair.eager.bn.eval()
    pair.agree(x)
    pair.amp_model.drop.eval()
    pair.eager.drop.eval()
    pair.agree(x)
    assert pair.original.bn.num_batches_tracked == 1
    pair.train(False).agree(x)
