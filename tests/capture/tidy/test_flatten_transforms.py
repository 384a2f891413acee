"""Batched code of torch.vmap in a graph of Dynamo's is converted as code on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchRuntimeError

import autocastfx
from autocastfx.capture import tidy
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from tests.helpers import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
EPS = torch.finfo(LOW).eps


class Batched(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        y = torch.vmap(self.function, in_dims=(0, None))(self.layer(x), self.layer.weight)
        return y.tanh()


def nested(a: Tensor, weight: Tensor) -> Tensor:
    return torch.vmap(lambda row: weight.mT @ row + torch.ones(8).cumsum(0))(a)


def nested_rows(a: Tensor, weight: Tensor) -> Tensor:
    return torch.vmap(lambda row: row @ weight)(a)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, weight: a @ weight.mT,
    "softmax": lambda a, weight: torch.softmax(a @ weight, -1) @ weight,
    "nested": nested,
    "linear": lambda a, weight: nn.functional.linear(a, weight).relu(),
    "detached": lambda a, weight: (a @ weight) / (a @ weight).detach().abs().amax(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name: str) -> None:
    agree(FUNCTIONS[name])


def test_any_size_is_right_where_torch_captures_it() -> None:
    """torch 2.11 captures no product of rows in a vmap inside another, if their number may change."""
    captured = torch.compile(Batched(nested_rows), backend="eager", dynamic=True)
    try:
        captured(torch.randn(3, 4, 8))
    except TorchRuntimeError:
        with pytest.raises(CaptureError, match=r"Batched fails: .*\n.*test_flatten_transforms\.py:\d+: .*row @ weight"):
            agree(nested_rows, dynamic=True)
    else:
        agree(nested_rows, dynamic=True)
    agree(nested_rows, dynamic=False)


def agree(function: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
    """Compare a converted model with the same in float32, for two sizes."""
    torch.manual_seed(0)
    model, other = Batched(function), Batched(function)
    other.load_state_dict(model.state_dict())
    backend = autocastfx.CompileBackend(dtype=LOW, inner="eager")
    backend.compile(model, **options)
    for size in (4, 5):
        x = torch.randn(3, size, 8)
        model.zero_grad()
        other.zero_grad()
        found, exact = model(x), other(x)
        found.square().sum().backward()
        exact.square().sum().backward()
        assert 0 < relative_error(found.detach(), exact.detach()) < 8 * EPS
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert relative_error(ours.grad, theirs.grad) < 16 * EPS
    low = [node.op for graph in backend.graphs if graph.plan for node in graph.plan.nodes if graph.plan]
    assert backend.skipped == []
    assert all(graph.failure == "" for graph in backend.graphs)
    assert {"mm", "bmm", "matmul"} & set(low)


def test_code_that_switches_gradients_in_vmap_is_told() -> None:
    def switching(a: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            b = a @ weight
        return a @ weight + b

    torch.manual_seed(0)
    model, x = Batched(switching), torch.randn(3, 4, 8)
    autocastfx.enable(model, dtype=LOW)
    told = "cannot be converted and runs under torch.autocast, .* inside torch.vmap, .* switches gradients or autocast"
    with pytest.warns(UncapturedGraphWarning, match=told):
        model(x).sum().backward()
    theirs: Any = Batched(switching)
    theirs.load_state_dict(model.state_dict())
    with torch.autocast("cpu", LOW):
        theirs(x).sum().backward()
    assert torch.equal(model.layer.weight.grad, theirs.layer.weight.grad)  # type: ignore[arg-type]


def test_a_transform_that_ends_in_another_graph_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(tidy._ENTER[0], (2, "error"))
    graph.output((graph.call_function(torch.neg, (x,)),))
    with pytest.raises(CaptureError, match=r"inside torch\.vmap, .*, breaks the graph"):
        tidy.flatten_transforms(fx.GraphModule({}, graph))
