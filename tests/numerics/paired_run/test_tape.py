"""A run that keeps what backward needs gives the gradient of each value once, complete, and as torch does."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from autocastfx import convert
from autocastfx.numerics.paired_run import Gradients, Tape, run_backwards, run_side_by_side
from tests.helpers import Function


@torch.library.custom_op("tape::scaled", mutates_args=())
def scaled(x: Tensor, by: float, shift: Tensor) -> Tensor:
    return x * by + shift


scaled.register_fake(lambda x, by, shift: torch.empty_like(x))
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


def gradients_of(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Gradients]:
    """Run a function's graph backwards from the sum of its result, without any cast."""
    run = run_side_by_side(None, convert(Function(function), inputs, op_list="float32"), inputs, {}, gradients=True)
    assert list(run.steps())
    found: list[Gradients] = []
    run_backwards(run, None, 1.0, found.append)
    names = [one.name for one in found]
    assert len(names) == len(set(names)), "once each"
    return {one.name: one for one in found}


@pytest.mark.parametrize("function", [residual, broadcast, in_place, several, functions])
def test_gradients_are_those_of_torch(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(4, 4).requires_grad_() for _ in "xy")
    expected = torch.autograd.grad(function(x, y).float().sum(), (x, y))
    found = gradients_of(function, x, y)
    leaves = {name: one for name, one in sorted(found.items()) if one.is_leaf}
    assert len(leaves) == 2
    for one, gradient in zip(leaves.values(), expected, strict=True):
        assert all(torch.equal(given, gradient) for given in (*one.low, *one.full))
    assert len(found) > 3, "of values, too"
    assert x.grad is None
    assert y.grad is None


def test_a_tape_has_the_values_that_a_node_made_and_that_have_gradients() -> None:
    graph, tape, x = fx.Graph(), Tape(), torch.ones(2, requires_grad=True)
    several, passed_on, no_float = (graph.call_function(operator.getitem) for _ in range(3))
    start = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    y = x * 3
    tape.end(several, (y, y.detach(), y > 0), start)
    start = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    for node, value in ((passed_on, y), (no_float, y > 0), (no_float, x)):
        tape.end(node, value, start)
    assert tape.made == {several: [get_gradient_edge(y), None]}


def test_the_gradient_of_a_value_is_of_all_its_readers() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def twice_read(x: Tensor) -> Tensor:
        y = x * 3
        return y * y + y

    found = gradients_of(twice_read, x)
    assert torch.equal(found["mul"].low[0], 2 * 3 * x.detach() + 1)
    assert [one.low[0].tolist() for one in found.values() if one.is_leaf] == [(3 * (2 * 3 * x.detach() + 1)).tolist()]


def test_a_result_that_nothing_reads_leaves_the_others_gradients() -> None:
    def half_read(x: Tensor) -> Tensor:
        return torch.var_mean(x * 2)[0]

    found = gradients_of(half_read, torch.tensor([1.0, 2.0], requires_grad=True))
    assert [[len(one.low), len(one.full)] for one in found.values()] == [[1, 1]] * len(found)
    assert "var_mean" in found


@pytest.mark.parametrize("learns", [True, False])
def test_a_loss_keeps_its_own_parameters_without_gradients(learns: bool) -> None:
    inputs, own = (torch.ones(2, requires_grad=learns),), torch.ones(2, requires_grad=True)
    amp_model = convert(Function(lambda x: torch.tanh(x)), inputs)
    run = run_side_by_side(None, amp_model, inputs, {}, gradients=True)
    assert list(run.steps())
    found: list[Gradients] = []
    run_backwards(run, lambda output: (output.float() * own).sum(), 1.0, found.append)
    assert bool(found) == learns
    assert own.grad is None
