"""Working copies are renewed where they are, by one autograd node for all calls, unless somebody waits to read them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import AmpModule
from autocastfx.runtime.working_copies import WorkingCopies

LOW = torch.bfloat16


def pair(model: nn.Module, x: Tensor) -> tuple[AmpModule, AmpModule]:
    """A model converted with casts, and a twin of it with working copies."""
    twin = type(model)(*model.children()) if isinstance(model, nn.Sequential) else model
    return (
        autocastfx.convert(twin, (x,), dtype=LOW),
        autocastfx.convert(model, (x,), dtype=LOW, weights="cached"),
    )


def places(amp_model: AmpModule) -> list[int]:
    copies: Any = amp_model._working_copies
    assert isinstance(copies, WorkingCopies)
    return [held.tensor.data_ptr() for held in copies.held.values()]


KINDS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (4, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3)), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("waits", [False, True], ids=["nobody waits", "a backward waits"])
def test_memory_is_kept_unless_a_backward_waits(kind: str, waits: bool, calls: int) -> None:
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    x = torch.randn(*shape)
    cast, amp_model = pair(make(), x)
    optimizer = torch.optim.SGD(amp_model.parameters(), 0.1, fused=True)  # lets a backward run after its step
    for _ in range(calls):
        amp_model(x).sum().backward()
    optimizer.zero_grad()
    loss = amp_model(x).sum()
    before = places(amp_model)
    expected = torch.autograd.grad(loss, list(amp_model.parameters()), retain_graph=True)
    for parameter, grad in zip(amp_model.parameters(), expected, strict=True):
        parameter.grad = grad.clone()
    if not waits:
        loss = loss.detach()
    optimizer.step()
    for _ in range(2):
        assert torch.equal(amp_model(x), cast(x))
    assert (places(amp_model) == before) is not waits
    if waits:  # with the weights that were used
        found = torch.autograd.grad(loss, list(amp_model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_parameter_whose_copy_is_held_is_renewed_elsewhere(kind: str) -> None:
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    model, x = make().requires_grad_(False), torch.randn(*shape, requires_grad=True)
    cast, cached = pair(model, x)
    grads: list[Tensor] = []
    for amp_model in (cached, cast):
        amp_model(x)
        y = amp_model(x).sum()
        expected = torch.autograd.grad(y, x, retain_graph=True)
        with torch.no_grad():
            model[0].weight.mul_(2)
            amp_model(x)
            model[0].weight.div_(2)
        grads += [*expected, *torch.autograd.grad(y, x)]
    assert all(torch.equal(grads[0], other) for other in grads[1:])


def test_calls_that_share_a_node_run_backwards_in_any_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    xs = torch.randn(3, 4, 8)
    grads: list[list[Tensor]] = []
    for amp_model in pair(model, xs[0]):
        amp_model(xs[0])
        losses = [amp_model(x).square().sum() for x in xs]
        for loss in (losses[1], losses[2], losses[0]):
            model.zero_grad()
            loss.backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(grads[:3], grads[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradients_come_as_early_as_with_casts() -> None:
    """DDP sends the last layers' gradients while backward computes those of the first."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(24))), torch.randn(2, 8, requires_grad=True)
    came: list[int] = []
    x.register_hook(lambda _: came.append(-1))
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: came.append(number))
    amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
    for _ in range(3):
        came.clear()
        amp_model(x).sum().backward()
        before = came[: came.index(-1)]  # the first layer has run backwards
        assert set(range(8, 24)) <= set(before), "a group of copies is sixteen parameters"


def test_a_parameter_that_was_replaced_is_let_go() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
    for _ in range(2):
        amp_model(x).sum().backward()
    gone = weakref.ref(model.weight)
    for owner in (model, amp_model):
        owner.weight = nn.Parameter(torch.randn(8, 8))
    amp_model(x)
    gc.collect()
    assert gone() is None


def test_a_parameter_that_is_frozen_and_trained_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    cast, cached = pair(model, x)
    for learns in (True, True, False, True):
        model[1].weight.requires_grad_(learns)
        found: list[list[Tensor | None]] = []
        for amp_model in (cast, cached):
            model.zero_grad()
            amp_model(x).sum().backward()
            found.append([p.grad for p in model.parameters()])
        assert [grad is not None for grad in found[1]] == [True, True, learns, True]
        assert all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    model.requires_grad_(False)
    assert not cached(x).requires_grad


def test_second_derivatives_are_those_of_casts() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(2, 8)
    found: list[tuple[Tensor, ...]] = []
    for amp_model in pair(model, x):
        for _ in range(2):
            given = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(amp_model(given).sum(), given, create_graph=True)
            again = torch.autograd.grad(grad.square().sum(), list(model.parameters()), allow_unused=True)
        found.append(tuple(g for g in again if g is not None))
    assert len(found[0]) == len(found[1]) >= 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_step_may_write_the_copies_that_no_backward_waits_to_read() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    amp_model: Any = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
    loss = amp_model(x).sum()
    masters: dict[int, Tensor] = {id(parameter): parameter for parameter in model.parameters()}
    assert id(model.weight) not in amp_model._working_copies.writable(masters)
    loss.backward()
    del loss
    assert amp_model._working_copies.writable(masters).keys() == masters.keys()


class TwoHeads(nn.Module):
    """Two losses, of which one or the other is used.

    Args:
        teacher: where its second result comes from: a head, one that gets no gradient, or a value that is written.
    """

    def __init__(self, second: str = "head") -> None:
        super().__init__()
        self.body, self.first, self.second, self.kind = *(nn.Linear(16, 16) for _ in range(3)), second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        if self.kind == "no_grad":
            with torch.no_grad():
                other = self.second(z)
        elif self.kind == "detach":
            other = self.second(z).detach()
        elif self.kind == "written":
            other = torch.zeros_like(z).add_(self.second(z)) + 0
        else:
            other = self.second(z)
        return self.first(z).square().mean(), other.square().mean()


@pytest.mark.parametrize("kind", ["head", "no_grad", "detach", "written"])
@pytest.mark.parametrize("way", ["convert", "enable"])
def test_hooks_of_parameters_that_a_loss_does_not_reach_are_not_called(way: str, kind: str) -> None:
    torch.manual_seed(0)
    model, x, called = TwoHeads(kind), torch.randn(4, 16), list[str]()
    if way == "convert":
        run: Any = autocastfx.convert(model, x, dtype=LOW, weights="cached")
    else:
        run = autocastfx.enable(model, dtype=LOW, weights="cached")
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: (called.append(name), grad * 2)[1])
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    for _ in range(2):
        called.clear()
        run(x)[0].backward()
        assert {name.partition(".")[0] for name in called} == {"body", "first"}
    if kind in ("head", "written"):
        called.clear()
        run(x)[1].backward()
        assert {name.partition(".")[0] for name in called} == {"body", "second"}


def test_parameters_of_one_loss_are_read_together() -> None:
    amp_model = autocastfx.convert(
        nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))), torch.ones(2, 16), weights="cached", dtype=LOW
    )
    amp_model(torch.ones(2, 16)).sum().backward()
    copies: Any = amp_model._working_copies
    assert sorted(len(group.copies) for group in copies.groups.values()) == [8, 16]
