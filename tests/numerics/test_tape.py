"""A backward pass that halts gives what torch's own engine gives, to the bit, and keeps little on its way."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from autocastfx.numerics.paired_run import Backward, Tape, edge_of


@torch.library.custom_op("tape::scaled", mutates_args=())
def scaled(x: Tensor, by: float, shift: Tensor) -> Tensor:
    return x * by + shift


scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.by, None, gradient),
    setup_context=lambda ctx, inputs, output: _keep(ctx, inputs),
)


def _keep(ctx: object, inputs: tuple[Tensor, float, Tensor]) -> None:
    ctx.by = inputs[1]  # type: ignore[attr-defined]


class Halves(torch.autograd.Function):
    """Gives two values, of which one may have no gradient."""

    @staticmethod
    def forward(ctx: object, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * number, x + 1

    @staticmethod
    def backward(ctx: object, first: Tensor, second: Tensor) -> tuple[None, Tensor]:
        return None, first * 3 + second


def residual(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = x + torch.tanh(x @ y)
    return x * y


def broadcast(x: Tensor, y: Tensor) -> Tensor:
    return (x * y[0]).half().square() + y[0, 0]


def in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    view = z[1]
    view.mul_(y[0])
    z[2] = y[1]
    return torch.cat([z, view[None]]).exp() + view


def several(x: Tensor, y: Tensor) -> Tensor:
    first, second = (x * y).split(2)
    values, _ = torch.topk(second, 2)
    variance, mean = torch.var_mean(first)
    return values.sum() * variance + mean


def functions(x: Tensor, y: Tensor) -> Tensor:
    one, _ = Halves.apply(3, x)  # type: ignore[misc]
    return scaled(one, 2.0, y.exp()) * x  # type: ignore[operator]


@pytest.mark.parametrize("function", [residual, broadcast, in_place, several, functions])
def test_gradients_are_those_of_torch_wherever_it_halts(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(4, 4).requires_grad_() for _ in "xy")
    expected = torch.autograd.grad(function(x, y).float().sum(), (x, y))
    first = edge_of(x * 1)[0]._sequence_nr()
    output = function(x, y).float().sum()
    backward = Backward(output, torch.ones(()))
    for mark in range(edge_of(output)[0]._sequence_nr(), first, -1):
        backward.run_to(mark)
    assert backward.at == first + 1
    for leaf, gradient in zip((x, y), expected, strict=True):
        found = backward.gradient(edge_of(leaf))
        assert found is not None
        assert torch.equal(found, gradient)
        backward.forget(edge_of(leaf))
    assert backward.pending == 0
    assert x.grad is None


def test_a_tape_has_the_values_that_a_node_made_and_that_have_gradients() -> None:
    graph, tape, x = fx.Graph(), Tape(), torch.ones(2, requires_grad=True)
    several, passed_on, no_float = (graph.call_function(operator.getitem) for _ in range(3))
    tape.start(several)
    y = x * 3
    tape.end(several, (y, y.detach(), y > 0))
    for node, value in ((passed_on, y), (no_float, y > 0)):
        tape.start(node)
        tape.end(node, value)
    assert tape.made == {several: [edge_of(y), None]}


def test_halfway_the_gradient_of_a_value_is_complete() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x * 3
    edge = edge_of(y)
    z = (y * y + y).sum()
    backward = Backward(z, torch.ones(()))
    assert backward.gradient(edge) is None
    backward.run_to(edge[0]._sequence_nr() + 1)
    assert torch.equal(torch.as_tensor(backward.gradient(edge)), 2 * y.detach() + 1)
    assert backward.gradient(edge_of(x)) is None
    backward.run_to(0)
    assert torch.equal(torch.as_tensor(backward.gradient(edge_of(x))), 3 * (2 * y.detach() + 1))


def test_of_gradients_only_those_that_are_still_read_are_kept() -> None:
    x = torch.ones(4, requires_grad=True)
    y = x
    for _ in range(50):
        y = torch.tanh(y) + y
    backward = Backward(y.sum(), torch.ones(()))
    most, last = 0, edge_of(y)[0]._sequence_nr()
    for mark in range(last + 1, last - 99, -1):
        backward.run_to(mark)
        most = max(most, backward.pending)
    assert most <= 2
