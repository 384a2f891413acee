"""Which overload a call of Python's becomes, with which arguments."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from autocastfx.capture.draft.tracer import overload, reflected
from autocastfx.graph.node import set_value

aten = torch.ops.aten


@pytest.fixture
def x() -> fx.Node:
    return _node(torch.ones(1, 1))


@pytest.fixture
def n() -> fx.Node:
    return _node(1)


def _node(abstract: Any) -> fx.Node:
    node = fx.Graph().placeholder("x")
    set_value(node, abstract)
    return node


def chosen(packet: Any, *args: Any, **kwargs: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    found = overload(packet, args, kwargs)
    assert found is not None
    return str(found[0]).removeprefix("aten."), found[1], found[2]


def test_the_overload_is_the_one_that_python_calls(x: fx.Node) -> None:
    assert chosen(aten.add, x, 2.0)[0] == "add.Tensor"
    assert chosen(aten.pow, x, 2)[0] == "pow.Tensor_Scalar"
    assert chosen(aten.mean, x)[0] == "mean.default"
    assert chosen(aten.mean, x, -1, True)[0] == "mean.dim"
    assert chosen(aten.max, x, dim=1)[0] == "max.dim"


def test_sizes_in_a_row_are_a_list(x: fx.Node, n: fx.Node) -> None:
    assert chosen(aten.view, x, n, -1) == ("view.default", (x, [n, -1]), {})
    assert chosen(aten.permute, x, 1, 0) == ("permute.default", (x, [1, 0]), {})
    assert chosen(aten.zeros, 2, n, dtype=torch.int64) == ("zeros.default", ([2, n],), {"dtype": torch.int64})
    assert chosen(aten.repeat, x, 2) == ("repeat.default", (x, [2]), {})


def test_one_number_is_a_square_kernel(x: fx.Node) -> None:
    assert chosen(aten.adaptive_avg_pool2d, x, 3) == ("adaptive_avg_pool2d.default", (x, [3, 3]), {})


def test_keywords_of_python_are_those_of_the_operator(x: fx.Node) -> None:
    assert chosen(aten.sum, input=x, axis=1)[1:] == ((), {"self": x, "dim": 1})
    assert chosen(aten.softmax, x, dim=-1, out=None)[2] == {"dim": -1}


def test_what_no_overload_takes_is_none(x: fx.Node) -> None:
    assert overload(aten.view, (x, "text"), {}) is None
    assert overload(aten.relu, (x, x), {}) is None


def test_numbers_on_the_left(x: fx.Node) -> None:
    value = fx.Proxy(x)
    assert reflected(operator.add, (2, value)) == (operator.add, (value, 2))
    assert reflected(operator.sub, (2, value)) == (torch.Tensor.__rsub__, (value, 2))
    assert reflected(operator.truediv, (2, value))[0] is torch.Tensor.__rdiv__
    assert reflected(operator.sub, (value, 2)) == (operator.sub, (value, 2))
    assert reflected(torch.relu, (value,)) == (torch.relu, (value,))
