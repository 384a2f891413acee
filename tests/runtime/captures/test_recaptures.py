"""A number that changes from call to call is an input of the graph; what has a graph for each value is told."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autocastfx
from autocastfx.conversion import convert_captured
from autocastfx.errors import ManyVariantsWarning, VariantError
from autocastfx.runtime.captures import MANY
from tests.helpers import heard

CALLS = MANY + 3
X = torch.linspace(-2, 2, 128).view(16, 8)


@pytest.fixture(autouse=True)
def _views(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # it remembers which attributes of a class change


class Net(nn.Module):
    """A function of numbers that a model keeps, behind a linear layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.tau, self.count, self.text = 1.0, 1, "x"
        self.table, self.numbers, self.space = {"tau": 1.0}, [1.0], SimpleNamespace(tau=1.0)
        self.function = function

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return self.function(self, self.linear(x), *given)


def counted(m: Net, x: Tensor) -> Tensor:
    m.count += 1
    m.tau *= 0.9
    return x * m.count + m.tau


def attended(m: Net, x: Tensor) -> Tensor:
    heads = x.view(1, 2, 8, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, scale=m.tau)


# By what changes: what computes with it, and how it is set to another number, greater than 0.
Case = tuple[Callable[..., Tensor], Callable[[Net, float], Any]]


def tau(m: Net, value: float) -> None:
    m.tau = value


def count(m: Net, value: float) -> None:
    m.count = round(value * 100)


FOLLOWED: dict[str, Case] = {
    "a factor": (lambda m, x: x * m.tau, tau),
    "a temperature": (lambda m, x: (x / m.tau).softmax(-1), tau),
    "a power": (lambda m, x: x.abs() ** m.tau, tau),
    "a bound": (lambda m, x: x.clamp(-m.tau, m.tau), tau),
    "a slope": (lambda m, x: F.leaky_relu(x, m.tau), tau),
    "a constant": (lambda m, x: x + torch.full((8,), m.tau) + torch.tensor(m.tau), tau),
    "arithmetic": (lambda m, x: x * min(1.0, m.tau / 3) + m.tau**2, tau),
    "a scale of attention": (attended, tau),
    "a probability": (lambda m, x: F.dropout(x, p=m.tau), tau),
    "a probability in a module": (lambda m, x: m.drop(x), lambda m, value: setattr(m.drop, "p", value)),
    "a momentum": (lambda m, x: m.norm(x), lambda m, value: setattr(m.norm, "momentum", value)),
    "an epsilon": (lambda m, x: m.norm(x), lambda m, value: setattr(m.norm, "eps", value)),
    "an epsilon of a function": (lambda m, x: F.layer_norm(x, (8,), eps=m.tau), tau),
    "a smoothing": (
        lambda m, x: F.cross_entropy(x, torch.zeros(16, dtype=torch.int64), label_smoothing=m.tau),
        tau,
    ),
    "a range of random numbers": (lambda m, x: x + torch.empty(8).uniform_(0, m.tau), tau),
    "an int": (lambda m, x: x * m.count, count),
    "a length": (lambda m, x: x[: m.count], count),
    "numbers that forward counts": (counted, lambda m, value: None),
    "in a dict": (lambda m, x: x * m.table["tau"], lambda m, value: m.table.update(tau=value)),
    "in a list": (lambda m, x: x * m.numbers[0], lambda m, value: m.numbers.__setitem__(0, value)),
    "in an object": (lambda m, x: x * m.space.tau, lambda m, value: setattr(m.space, "tau", value)),
}


def close(ours: Tensor, theirs: Tensor) -> bool:
    return (ours - theirs).abs().max().item() < 0.03 * (1 + theirs.abs().max().item())


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_number_that_changes_is_followed_by_few_graphs(name: str) -> None:
    function, change = FOLLOWED[name]
    model = Net(function)
    other = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, X, dtype="bfloat16", check=False)
    for i in range(CALLS):
        for one in (model, other):
            change(one, 0.05 + 0.07 * i)
        torch.manual_seed(i)
        result = amp_model(X)
        torch.manual_seed(i)
        expected = other(X)
        assert close(result, expected), i
        assert all(map(close, model.buffers(), other.buffers())), i
        assert (model.tau, model.count) == (other.tau, other.count)
    assert len(amp_model.variants) <= 3


class Acting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def act(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


@pytest.mark.parametrize("way", [autocastfx.convert, autocastfx.enable])
def test_a_method_that_the_class_gets_is_followed(
    way: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Acting()
    other = copy.deepcopy(model)
    amp_model = way(model, dtype="bfloat16")
    amp_model(X)
    monkeypatch.setattr(Acting, "act", lambda self, x: x.tanh())
    assert close(amp_model(X), other(X))


@pytest.mark.parametrize("kind", [float, int])
def test_an_argument_that_changes_is_followed(kind: type) -> None:
    model = Net(lambda m, x, by: x * by)
    amp_model = autocastfx.convert(model, (X, kind(2)), dtype="bfloat16", check=False)
    for i in range(CALLS):
        assert close(amp_model(X, kind(3 + i)), model(X, kind(3 + i)))
    assert len(amp_model.variants) <= 3


def test_a_number_that_chooses_a_branch_has_a_graph_for_each() -> None:
    model = Net(lambda m, x: x * m.tau if m.tau > 0.5 else x - m.tau)
    amp_model = autocastfx.convert(model, X, dtype="bfloat16", check=False)
    for i in range(CALLS):
        model.tau = (i % 4) / 3
        assert close(amp_model(X), model(X))
    assert len(amp_model.variants) <= 4


@pytest.mark.parametrize(
    ("function", "change", "said"),
    [
        (lambda m, x: x * len(m.text), lambda m, i: setattr(m, "text", "x" * i), r"self\.text == 'x+'"),
        (lambda m, x: x * math.exp(-m.tau), lambda m, i: setattr(m, "tau", i / 7), r"self\.tau\) == \("),
    ],
)
def test_more_graphs_than_dynamos_limit_are_captured_and_told_once(
    function: Callable[..., Tensor], change: Callable[[Net, int], Any], said: str
) -> None:
    model = Net(function)
    amp_model = autocastfx.convert(model, X, dtype="bfloat16", check=False)
    with heard() as lines, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ManyVariantsWarning)
        for i in range(1, 2 * MANY):
            change(model, i)
            assert close(amp_model(X), model(X))
    assert len(amp_model.variants) >= 2 * MANY - 1
    (warning,) = (one for one in told if one.category is ManyVariantsWarning)
    assert f"more than {MANY} variants were captured for the call (x=float32[2d])" in str(warning.message)
    assert "test_recaptures.py" in str(warning.message)
    lines = [line for line in lines if "capturing variant" in line]
    assert lines[0].startswith("capturing variant 2: it does not hold that ")
    assert re.search(said, lines[-1])


class Picking(nn.Module):
    """In backward, a kernel of a CPU adds up the gradients of a row in 16 bits, as many as there are indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.second(torch.index_select(self.first(x), 0, rows))


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_what_is_decided_for_few_is_decided_again_for_many(way: str) -> None:
    torch.manual_seed(0)
    model = Picking()
    exact = copy.deepcopy(model)
    run = (
        autocastfx.convert(model, dtype="bfloat16") if way == "convert" else autocastfx.enable(model, dtype="bfloat16")
    )
    for count in (4, 6, 8, 2000, 7):
        gradients = list[Tensor]()
        for one in (run, exact):
            x = torch.ones(3, 4, requires_grad=True)
            one(x, torch.zeros(count, dtype=torch.int64)).sum().backward()
            assert x.grad is not None
            gradients.append(x.grad[0])
        ours, theirs = gradients
        assert (ours - theirs).norm() <= 4 * torch.finfo(torch.bfloat16).eps * theirs.norm(), count


def test_another_conversion_of_a_graph_refuses_sizes_that_it_was_not_decided_for() -> None:
    model, rules = Picking(), autocastfx.OpList.of({"deny": ["index_select"]}, name="mine")
    first = autocastfx.convert(model, op_list=["default", rules], dtype="bfloat16")
    x = torch.ones(3, 4)
    for count in (4, 6):
        first(x, torch.zeros(count, dtype=torch.int64))
    again = convert_captured(first, autocastfx.convert(model, dtype="bfloat16")._original.converter)
    assert again is not None
    again(x, torch.zeros(9, dtype=torch.int64))
    with pytest.raises(VariantError, match=r"decides for sizes where .* <= 16: convert the model again"):
        again(x, torch.zeros(2000, dtype=torch.int64))
    assert first(x, torch.zeros(2000, dtype=torch.int64)).shape == (2000, 4)


def test_what_runs_without_gradients_is_known_in_calls_without_too() -> None:
    """An update of state by a product is in float32, whose product is low elsewhere."""
    model = Net(lambda m, x: x @ iterated(m))
    model.register_buffer("left", torch.ones(8))
    other = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, X, dtype="bfloat16", check=False)
    amp_model(X)
    other(X)
    with torch.no_grad():
        assert not amp_model(X).requires_grad
        other(X)
    assert torch.equal(model.left, other.left)
    assert len(amp_model.variants) == 1


def iterated(m: Net) -> Tensor:
    with torch.no_grad():
        m.left.copy_(F.normalize(m.linear.weight @ m.left, dim=0))
    return m.linear.weight / (m.linear.weight @ m.left).norm()
