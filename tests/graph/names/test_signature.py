"""What the arguments of an op are, and what a node gives them."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from autocastfx.graph.names import argument_types, arguments


def scaled(x: torch.Tensor, factor: float = 2.0, *, mode: str = "a") -> torch.Tensor:
    return x * factor


def test_argument_types() -> None:
    types = argument_types("softmax")
    assert types is not None
    assert {(t.base, t.is_optional) for t in types["dtype"]} == {("ScalarType", True)}
    assert {t.base for t in types["dim"]} >= {"int"}
    padding = argument_types("conv2d")
    assert padding is not None
    assert {t.base for t in padding["padding"]} == {"int", "str"}
    assert argument_types("nowhere::op") is None
    assert argument_types("no_such_op") is None
    assert argument_types("torch.nn.GELU") is None
    assert set(argument_types("torch.nn.functional.cross_entropy") or ()) >= {"input", "target", "label_smoothing"}


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (torch.ops.aten.gelu.default, (), {}, {"approximate": "none"}),
        (torch.ops.aten.gelu.default, (), {"approximate": "tanh"}, {"approximate": "tanh"}),
        (torch.ops.aten.softmax.int, (-1,), {}, {"dim": -1, "dtype": None}),
        (torch.ops.aten.layer_norm.default, ([4],), {}, {"normalized_shape": [4], "eps": 1e-5, "weight": None}),
        (torch.nn.functional.gelu, (), {}, {"approximate": "none"}),
        (torch.softmax, (1,), {}, {"dim": 1, "dtype": None}),
        (operator.add, (3,), {}, {"other": 3, "alpha": 1}),
        (scaled, (), {}, {"factor": 2.0, "mode": "a"}),
        (scaled, (3.0,), {"mode": "b"}, {"factor": 3.0, "mode": "b"}),
    ],
)
def test_arguments_with_their_defaults(target, args, kwargs, expected) -> None:
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *args), kwargs)
    found = arguments(node)
    assert {name: found[name] for name in expected} == expected


def test_arguments_of_a_method() -> None:
    graph = fx.Graph()
    found = arguments(graph.call_method("sum", (graph.placeholder("x"),), {"dim": 1}))
    assert found == {**found, "dim": 1, "keepdim": False}


def test_what_is_not_known_is_left_out() -> None:
    class Callable:
        __name__ = "f"
        __qualname__ = "f"

        def __call__(self, *args: object) -> None: ...

    graph = fx.Graph()
    assert arguments(graph.call_function(Callable(), (1, 2), {"a": 3})) == {"a": 3}
