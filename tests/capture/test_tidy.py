"""Nodes that change nothing are not in the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import autocastfx
from autocastfx.errors import UncapturedGraphWarning
from autocastfx.graph.names import op_name
from autocastfx.graph.node import all_names
from tests.helpers import Function

X = torch.arange(12.0).view(3, 4)


def ops(function: Callable[[Tensor], Tensor]) -> list[str]:
    amp_model = autocastfx.convert(Function(function), (X,), dtype="float16")
    assert torch.equal(amp_model(X), function(X))
    return [op_name(node) for node in amp_model.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("function", [lambda x: x[:] + 1, lambda x: x[:, :] + 1, lambda x: x.exp()[0:, ::1] + 1])
def test_a_slice_of_everything_is_left_out(function: Callable[[Tensor], Tensor]) -> None:
    assert "slice" not in ops(function)


GIVEN_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice": lambda x: x[:],
    "a slice of a slice": lambda x: x[:][:, :],
    "an alias": lambda x: torch.ops.aten.alias(x),
    "dropout of nothing": lambda x: nn.functional.dropout(x, 0.0, True),
    "the argument": lambda x: x,
}


@pytest.mark.parametrize("way", ["convert", "enable"])
@pytest.mark.parametrize("name", GIVEN_OUT)
def test_what_is_given_out_is_the_argument_or_a_tensor_of_its_own(name: str, way: str) -> None:
    x = torch.randn(3, 4)
    given = GIVEN_OUT[name](x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncapturedGraphWarning)  # nothing is computed
        found = getattr(autocastfx, way)(Function(GIVEN_OUT[name]), dtype="float16")(x)
    assert (found is x) == (given is x)
    assert found.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "function", [lambda x: x[1:] + 1, lambda x: x[:-1] + 1, lambda x: x[:, ::2] + 1, lambda x: x[:3] + 1]
)
def test_a_slice_of_some_stays(function: Callable[[Tensor], Tensor]) -> None:
    """That of three rows, too: the next call may have more."""
    assert "slice" in ops(function)


def test_what_is_written_into_a_slice_of_everything_is_written() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.exp()
        made[:].mul_(2.0)
        made[:, :] += 1.0
        return made

    found = ops(function)
    assert "slice" not in found
    assert {"mul_", "add_"} <= set(found)


def test_a_cast_to_the_dtype_of_a_value_is_left_out_beside_a_default_device_too() -> None:
    """Dynamo calls each function through the mode that sets the device."""

    def function(x: Tensor) -> Tensor:
        return x.softmax(-1).type(x.dtype) + 1

    with torch.device("cpu"):
        assert "to" not in ops(function)


def test_the_name_of_a_module_may_begin_with_a_digit() -> None:
    """What runs without gradients is a graph of its own, whose arguments are named after tensors of the model."""
    torch.manual_seed(0)
    normed = parametrizations.spectral_norm(nn.Linear(4, 4))
    sequence = nn.Sequential(normed, nn.Linear(4, 2))
    amp_model = autocastfx.convert(sequence, X, dtype="float16")
    estimates = [buffer.clone() for buffer in sequence.buffers()]
    sequence(X)
    wanted = [buffer.clone() for buffer in sequence.buffers()]
    for buffer, estimate in zip(sequence.buffers(), estimates, strict=True):
        buffer.copy_(estimate)
    amp_model(X)
    assert all(torch.equal(buffer, one) for buffer, one in zip(sequence.buffers(), wanted, strict=True))
    assert not torch.equal(wanted[0], estimates[0])


def test_a_value_is_known_by_the_names_of_what_is_left_out() -> None:
    def function(x: Tensor) -> Tensor:
        shift = x.sin()
        with torch.no_grad():
            scale, same = x.exp(), torch.dropout(shift, 0.5, train=False)
        return torch.dropout(x.tanh(), 0.5, train=False)[:] * scale + same

    amp_model = autocastfx.convert(Function(function), (X,), dtype="float16")
    captured = amp_model.variants[0].captured
    assert captured is not None
    names = {node.name: all_names(node)[1:] for node in captured.graph.nodes}
    (region,) = (node for node in captured.graph.nodes if op_name(node) == "wrap_with_set_grad_enabled")
    assert names["tanh"] == ("dropout_1", "slice_1")
    inside = region.args[1].target
    assert [names[user.name] for user in region.users] == [(f"{inside}/exp",), ("sin", f"{inside}/dropout")]


class Forces(nn.Module):
    """Has layers whose names differ in one letter, and a gradient in calls without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.b(self.a(x).tanh()).sum(), x)
        return slope


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that Dynamo looks at
def test_layers_in_a_region_with_gradients_have_names_of_their_own() -> None:
    model = autocastfx.enable(Forces(), dtype="bfloat16", uncaptured="autocast")
    with torch.no_grad():
        assert model(X).shape == X.shape
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert not any(graph.failure for graph in backend.graphs)


class Cut(nn.Module):
    """Has a function inside that reads a variable of forward, behind a break of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, size: int | None = None) -> Tensor:
        size = x.shape[-1] - 1 if size is None else size

        def cut(y: Tensor) -> Tensor:
            return y[..., :size]

        y = self.a(x)
        torch._dynamo.graph_break()
        return cut(self.b(y))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that Dynamo looks at
def test_a_variable_of_forward_that_a_function_inside_reads() -> None:
    assert autocastfx.enable(Cut(), dtype="bfloat16", uncaptured="error")(X).shape == (3, 3)
