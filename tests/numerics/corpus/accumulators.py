"""Sums that begin with float32 zeros: each term is as small as a rounding of the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import rows

__all__ = ["CASES"]

WIDTH, STEPS = 16, 24


class Accumulated(nn.Module):
    """A recurrent layer whose states are added up.

    Args:
        start: the sum's first value, from the input and the first state.
    """

    def __init__(self, start: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.start, self.encode, self.step = start, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def add(self, total: Tensor, state: Tensor) -> Tensor:
        return total + state.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        state = self.encode(x)
        total = self.start(x, state)
        for _ in range(STEPS):
            state = torch.tanh(self.step(state))
            total = self.add(total, state)
        return total


class InPlace(Accumulated):
    def add(self, total: Tensor, state: Tensor) -> Tensor:
        total += state.sigmoid()
        return total


class Average(Accumulated):
    """A running average, which forgets slowly."""

    def add(self, total: Tensor, state: Tensor) -> Tensor:
        return 0.95 * total + 0.05 * state.sigmoid()


class Subtracted(Accumulated):
    def add(self, total: Tensor, state: Tensor) -> Tensor:
        return total - state.sigmoid()


class Penalty(Accumulated):
    """A loss of each step, added to the others as a number."""

    def add(self, total: Tensor, state: Tensor) -> Tensor:
        return total + state.sigmoid().mean()


class Halting(nn.Module):
    """Adaptive computation: states, each weighted by its probability of being the last."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.step, self.halt = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.encode(x)
        total, left = torch.zeros(x.shape[0], WIDTH), torch.ones(x.shape[0], 1)
        for _ in range(STEPS):
            state = torch.tanh(self.step(state))
            here = torch.sigmoid(self.halt(state) - 3)
            total, left = total + left * here * (state + 2), left * (1 - here)
        return total + left * (state + 2)


def zeros(x: Tensor, state: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], WIDTH)


POINT = "first values"
WHY = "three roundings in a term; those of many terms are independent, and average out; gradients run through all steps"
EACH = Demand(3, condition=STEPS**-0.5, gradient=STEPS)
STARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": zeros,
    "zeros-like-input": lambda x, state: torch.zeros_like(x),
    "zeros-like-widened": lambda x, state: torch.zeros_like(state.float()),
    "new-zeros": lambda x, state: x.new_zeros(x.shape),
    "broadcast-zeros": lambda x, state: torch.zeros(1, WIDTH),
    "counted-zeros": lambda x, state: torch.zeros(x.shape, dtype=torch.long).float(),
}

CASES = [
    *(Case(f"sum-from-{n}", lambda s=s: Accumulated(s), rows(WIDTH), POINT, EACH, WHY) for n, s in STARTS.items()),
    Case("sum-in-place", lambda: InPlace(zeros), rows(WIDTH), POINT, EACH, WHY),
    Case("running-average", lambda: Average(zeros), rows(WIDTH), POINT, EACH, WHY),
    Case("subtracted-from-zeros", lambda: Subtracted(zeros), rows(WIDTH), POINT, EACH, WHY),
    Case("penalty", lambda: Penalty(lambda x, state: torch.zeros(())), rows(WIDTH), POINT, EACH, WHY),
    Case("halting", Halting, rows(WIDTH), POINT, Demand(4, gradient=STEPS), "a state 3, the halting weight 1"),
]
