"""How a model behaves in a call, and how far another one is from that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.runtime import behaviour
from tests.numerics.test_check import Calls


class Centred(nn.Module):
    """Subtracts the mean of the batch, which of one row leaves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(hidden - hidden.mean(0))


ROWS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one row tells enough": (lambda: nn.Linear(8, 4), 1),
    "the norm of one row raises": (lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), 2),
    "one row teaches nothing": (Centred, 2),
    "the graph holds for all rows alone": (lambda: Calls(lambda y: y.reshape(3, 8)), 6),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_conversion_is_compared_on_as_few_rows_as_tell_enough(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, rows = ROWS[kind]
    model, own, seen = make(), behaviour.behaviour_of, list[int]()
    x = torch.randn(6, next(m.in_features for m in model.modules() if isinstance(m, nn.Linear)))

    def behaviour_of(model: nn.Module, call: Any, trial: behaviour.Trial) -> behaviour.Behaviour:
        found = own(model, call, trial)
        if call is not model:
            seen.append(len(trial.arguments[0][0]))
        return found

    monkeypatch.setattr(behaviour, "behaviour_of", behaviour_of)
    # Of so small a model, all rows take less time than a capture for few.
    monkeypatch.setattr("autocastfx.conversion.FewRows", lambda other, _: behaviour.FewRows(other, 0.0))
    autocastfx.convert(model, x, dtype="bfloat16")
    assert seen[0] == rows
    seen.clear()
    autocastfx.convert(model, x, dtype="bfloat16", check=True)
    assert set(seen) == {6}


@pytest.mark.parametrize("calls", [{0}, {1}, {1, 2}, {0, 3}, {1, 2, 4}], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_random_numbers_that_another_thread_draws_meanwhile_are_no_difference(
    calls: set[int], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, number = behaviour.behaviour_of, itertools.count()

    def behaviour_of(model: nn.Module, call: Any, trial: behaviour.Trial) -> behaviour.Behaviour:
        is_disturbed = next(number) in calls

        def disturbed(*args: Any) -> Any:
            torch.rand(1)  # as another thread would
            return call(*args)

        return own(model, disturbed if is_disturbed else call, trial)

    monkeypatch.setattr(behaviour, "behaviour_of", behaviour_of)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate), nn.Linear(8, 4))
    autocastfx.convert(model, torch.randn(6, 8), dtype="bfloat16")


@pytest.mark.parametrize("shape", [(), (300,), (300, 300), (64, 8, 3, 3)])
def test_distances_in_short_are_about_those_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    one_off = whole.clone()
    one_off.view(-1)[-1:] += 100 * whole.norm()
    others = (whole, whole * (1 + 1e-6), whole * 1.01, one_off)
    short, near, far, moved = (torch.tensor(behaviour._in_short(one)) for one in others)
    assert len(short) == 8
    assert behaviour.relative_distance(short, near) < 1e-5
    assert behaviour.relative_distance(short, far) > 5e-3
    assert behaviour.relative_distance(short, moved) > 10


def test_rows_that_change_places_are_seen_in_short() -> None:
    whole = torch.randn(300, 300)
    swapped = torch.cat((whole[1:2], whole[:1], whole[2:]))
    short, moved = (torch.tensor(behaviour._in_short(one)) for one in (whole, swapped))
    assert 0.2 < behaviour.relative_distance(short, moved) / behaviour.relative_distance(whole, swapped) < 5


def test_a_gradient_that_is_no_longer_sparse_is_a_difference() -> None:
    def behaves(sparse: bool) -> behaviour.Behaviour:
        model = nn.Embedding(9, 8, sparse=sparse)
        nn.init.ones_(model.weight)
        trial = behaviour.Trial("a call", ((torch.arange(3),), {}), [True])
        return behaviour.behaviour_of(model, model, trial)

    (found,) = behaviour.differences(behaves(True), behaves(False), "a call")[:1]
    assert str(found) == "gradient of weight is there (a call)"


class Numbering(nn.Module):
    """Keeps an iterator, which goes forward in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(16, 16), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        self.number = next(self.numbers)
        return self.linear(x)


def test_a_comparison_leaves_the_iterators_of_a_model() -> None:
    model, x = Numbering(), torch.randn(4, 16)
    amp_model = autocastfx.convert(model, (x,), dtype="bfloat16")
    for count in range(3):
        amp_model(x)
        assert model.number == count
