"""Objects that a model keeps do what they do in Python, or are refused."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError

X = torch.linspace(-2, 2, 128).view(16, 8)


class Noisy(nn.Module):
    """Draws in several ways from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator) + torch.rand(8, generator=self.generator)
        mask = torch.bernoulli(torch.full((8,), 0.5), generator=self.generator)
        return self.linear(x) * mask + noise + torch.empty(8).uniform_(0, 1, generator=self.generator)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return (ours - theirs).abs().max().item() < 0.02 * (1 + theirs.abs().max().item())


def test_torchs_draws_as_in_the_model_and_conversion_draws_nothing() -> None:
    model = Noisy()
    other = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, X, dtype="bfloat16", check=True)
    for _ in range(4):
        assert close(amp_model(X), other(X))
    model.generator, other.generator = (torch.Generator().manual_seed(9) for _ in range(2))
    assert close(amp_model(X), other(X))


def test_a_copy_draws_from_its_own() -> None:
    amp_model = autocastfx.convert(Noisy(), X, dtype="bfloat16", check=False)
    copied = copy.deepcopy(amp_model)
    first, second = amp_model(X), amp_model(X)
    assert torch.equal(copied(X), first)
    assert torch.equal(copied(X), second)


def test_pythons_is_refused() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.rng = nn.Linear(8, 8), random.Random(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.rng.random()

    with pytest.raises(CaptureError, match=r"a random\.Random that the model keeps: random draws.*\n.*self\.rng\.ran"):
        autocastfx.convert(Drawing(), X, dtype="bfloat16")


class Ring(nn.Module):
    """Keeps the last values, no more than its deque holds."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(8, 8), deque([torch.ones(16, 8)], maxlen=most)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(self.linear(x).detach())
        return sum(self.last) + self.last[0] * len(self.last)


def test_a_deque_keeps_its_bound() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(X)  # Dynamo may have been used before
    model, other = Ring(3), Ring(3)
    amp_model = autocastfx.convert(model, X, dtype="bfloat16", check=False)
    for _ in range(5):
        assert close(amp_model(X), other(X))
    assert (len(model.last), model.last.maxlen) == (3, 3)
    for one in (model, other):
        one.last = deque(one.last, maxlen=2)
    model.last, other.last = deque(list(model.last), maxlen=4), deque(list(other.last), maxlen=4)
    for _ in range(3):
        assert close(amp_model(X), other(X))
    assert len(model.last) == 4


class Order(tuple[int, ...]):
    """A tuple without a length, as e3nn has them."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.order = nn.Linear(8, 8), Order((3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for factor in self.order:
            x = x * factor
        return x


@pytest.mark.parametrize("way", [autocastfx.convert, autocastfx.enable])
def test_a_tuple_whose_class_has_no_length_is_followed(way: Callable[..., Any]) -> None:
    model = Ordered()
    options = {"uncaptured": "error"} if way is autocastfx.enable else {"check": True}
    given = () if way is autocastfx.enable else (X,)
    amp_model = way(model, *given, dtype="bfloat16", **options)
    other = Ordered()
    other.load_state_dict(model.state_dict())
    assert close(amp_model(X), Ordered.forward(other, X))
    for order in ((3, -1), (3, -1, 2), (3,)):
        model.order = other.order = Order(order)
        assert close(amp_model(X), Ordered.forward(other, X))
