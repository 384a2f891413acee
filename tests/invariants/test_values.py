"""Outputs, inputs and buffers keep value semantics and dtype."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autocastfx
from tests.invariants.pair import LOW, NEGATIVE, Net, Pair, Record, net

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


Named2 = namedtuple("Named2", "first second")


def _dict(m: Net, x: Tensor) -> Any:
    return OrderedDict(low=m.a(x), none=None, number=3, word="w", size=x.shape[0], nested=[(m.b(x),), {"k": x.sum()}])


OUTPUTS: dict[str, Callable[..., Any]] = {
    "dict": _dict,
    "tuple": lambda m, x: (m.a(x), m.b(x).argmax(-1)),
    "list": lambda m, x: [m.a(x), x > 0],
    "namedtuple": lambda m, x: Named2(m.a(x), x.long()),
    "dataclass": lambda m, x: Record(m.a(x)),
    "0-d": lambda m, x: m.a(x).mean(),
    "same value twice": lambda m, x: (lambda y: (y, y, y[0]))(m.a(x)),
    "an input": lambda m, x: (x, m.a(x), x),
    "a parameter": lambda m, x: (m.a(x), m.a.weight, m.a.bias),
    "a constant": lambda m, x: (m.a(x), torch.tensor([1.0, 2.0]), torch.tensor(3)),
    "double": lambda m, x: (m.a(x).double(), m.a(x).half()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_keep_structure_and_dtype(name: str) -> None:
    x = torch.randn(3, 8)
    Pair.of(net(OUTPUTS[name]), (x,), torch.bfloat16).agree(x)


@pytest.mark.parametrize("low", LOW)
def test_nested_outputs_keep_structure_and_dtype(low: torch.dtype) -> None:
    x = torch.randn(3, 8)
    pair = Pair.of(net(lambda m, x: {name: make(m, x) for name, make in OUTPUTS.items()}), (x,), low)
    found, _ = pair.agree(x)
    first, second, _ = found["same value twice"]
    assert first is second


def test_an_output_that_is_an_input_or_a_parameter_is_that_tensor() -> None:
    x = torch.randn(3, 8)
    model = net(lambda m, x: (m.a(x), x, m.a.weight, m.state), state=torch.ones(2))
    _, given, weight, state = autocastfx.convert(model, (x,), dtype="float16")(x)
    assert given is x
    assert weight is model.a.weight
    assert state is model.state


def test_an_output_is_not_changed_by_a_later_call() -> None:
    x = torch.randn(3, 8)
    amp_model = autocastfx.convert(net(lambda m, x: m.b(m.a(x).relu_())), (x,), dtype="float16")
    first = amp_model(x)
    before = first.clone()
    amp_model(torch.randn(3, 8))
    assert torch.equal(first, before)


def test_inputs_keep_their_values() -> None:
    x, mask = torch.randn(3, 8), torch.full((3, 8), NEGATIVE)
    given = (x.clone(), mask.clone())
    amp_model = autocastfx.convert(net(lambda m, x, mask: m.b((m.a(x) + mask).softmax(-1))), given, dtype="float16")
    amp_model(*given)
    assert torch.equal(given[0], x)
    assert torch.equal(given[1], mask)
    assert given[0]._version == 0


def test_a_view_of_an_input_that_is_returned_stays_a_view() -> None:
    x = torch.randn(3, 8)
    amp_model = autocastfx.convert(net(lambda m, x: (m.a(x), x[:, :2], x.t())), (x,), dtype="float16")
    _, part, turned = amp_model(x)
    assert part.data_ptr() == turned.data_ptr() == x.data_ptr()
