"""Hooks that a forward registers on tensors run in a converted model, or are refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext as same
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.errors import CaptureError, UncapturedGraphWarning, UnsupportedError

X = torch.linspace(-1, 1, 32).reshape(4, 8)
Register = Callable[["Hooked", torch.Tensor], object]

# Dynamo of torch 2.11 makes a function of autograd for a hook. It moves a late hook to where the tensor is made.
OLD = hasattr(torch._dynamo.external_utils, "_ApplyBackwardHook")
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def tenth(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.1


class Hooked(nn.Module):
    """Two layers, and a hook on what is between them."""

    def __init__(self, register: Register, late: Register | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)
        self.register, self.late = register, late
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.register(self, h)
        y = torch.tanh(h)
        if self.late is not None:
            self.late(self, h)
        return self.b(y)

    def keep(self, gradient: torch.Tensor) -> None:
        self.seen = gradient


def a_lambda(_: Hooked, h: torch.Tensor) -> object:
    return h.register_hook(lambda g: g * 0.1)


def a_function(_: Hooked, h: torch.Tensor) -> object:
    return h.register_hook(tenth)


def two(_: Hooked, h: torch.Tensor) -> object:
    h.register_hook(lambda g: g.clamp(-0.05, 0.05))
    return h.register_hook(tenth)


def nothing(*_: object) -> None:
    pass


def gradient(call: Callable[..., Any], weight: torch.Tensor, x: torch.Tensor = X) -> torch.Tensor:
    weight.grad = None
    call(x).sum().backward()
    assert weight.grad is not None
    return weight.grad


def assert_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).norm() < 0.02 * wanted.norm()  # three roundings to bfloat16


@pytest.mark.parametrize("register", [a_lambda, a_function, two])
@pytest.mark.parametrize("way", ["convert", "enable"])
def test_hooks_change_the_gradient(register: Register, way: str) -> None:
    torch.manual_seed(0)
    model = Hooked(register)
    plain = copy.deepcopy(model)
    wanted = gradient(plain, plain.a.weight)
    if way == "convert":
        amp_model = autocastfx.convert(model, (X,), dtype=torch.bfloat16)
        copied = copy.deepcopy(amp_model)
        assert_alike(gradient(copied, copied.get_parameter("a.weight")), wanted)
    else:
        amp_model = autocastfx.enable(model, dtype=torch.bfloat16)
        if register is two and OLD:
            with pytest.raises(UnsupportedError, match=r"two hooks on one tensor, at return h\.register_hook\(tenth\)"):
                gradient(amp_model, model.a.weight)
            return
    for _ in range(2):
        assert_alike(gradient(amp_model, model.a.weight), wanted)


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_hooks_registered_by_hooks_of_modules(way: str) -> None:
    model = Hooked(nothing)
    model.a.register_forward_hook(lambda module, args, output: nothing(output.register_hook(tenth)))
    wanted = gradient(model, model.a.weight)
    if way == "convert":
        amp_model = autocastfx.convert(model, (X,), dtype=torch.bfloat16)
    else:
        amp_model = autocastfx.enable(model, dtype=torch.bfloat16)
    assert_alike(gradient(amp_model, model.a.weight), wanted)


def test_without_gradients_no_hook_runs() -> None:
    amp_model = autocastfx.convert(Hooked(a_function), (X,), dtype=torch.bfloat16)
    with torch.no_grad():
        assert amp_model(X).shape == (4, 1)


def test_a_function_as_hook_is_pickled() -> None:
    model = Hooked(a_function)
    wanted = gradient(model, model.a.weight)
    again = pickle.loads(pickle.dumps(autocastfx.convert(model, (X,), dtype=torch.bfloat16)))
    assert_alike(gradient(again, again.get_parameter("a.weight")), wanted)


def a_post_hook(self: Hooked, _: torch.Tensor) -> object:
    return self.a.weight.register_post_accumulate_grad_hook(nothing)


def a_hook_on_a_parameter(self: Hooked, _: torch.Tensor) -> object:
    return self.a.weight.register_hook(tenth)


def a_hook_on_a_node(_: Hooked, h: torch.Tensor) -> object:
    assert h.grad_fn is not None
    return h.grad_fn.register_hook(nothing)


def a_hook_before_a_node(_: Hooked, h: torch.Tensor) -> object:
    assert h.grad_fn is not None
    return h.grad_fn.register_prehook(nothing)


def a_hook_on_several(_: Hooked, h: torch.Tensor) -> object:
    return torch.autograd.graph.register_multi_grad_hook([h], nothing)


def with_a_list(_: Hooked, h: torch.Tensor) -> object:
    seen: list[torch.Tensor] = []
    return h.register_hook(seen.append)


def with_a_tensor(_: Hooked, h: torch.Tensor) -> object:
    scale = h.detach().abs().mean()
    return h.register_hook(lambda g: g / scale)


def in_a_partial(_: Hooked, h: torch.Tensor) -> object:
    return h.register_hook(partial(torch.mul, h.detach()))


def removed(_: Hooked, h: torch.Tensor) -> object:
    return h.register_hook(tenth).remove()


def keeps(self: Hooked, h: torch.Tensor) -> object:
    return h.register_hook(self.keep)


def retained(_: Hooked, h: torch.Tensor) -> object:
    return h.retain_grad()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize(
    "register", [a_hook_on_a_node, a_hook_before_a_node, a_hook_on_several, with_a_list, keeps, retained]
)
def test_what_a_graph_cannot_repeat_is_refused_with_the_line(register: Register) -> None:
    model = Hooked(register)
    with pytest.raises(CaptureError, match=r"(?s)cannot be captured.*test_tensor_hooks.py:\d+: .*enable"):
        autocastfx.convert(model, (X,))
    assert model.seen is None


@pytest.mark.parametrize("register", [with_a_tensor, in_a_partial, a_hook_on_a_parameter, a_post_hook])
def test_what_hooks_hold_is_of_each_call(register: Register) -> None:
    torch.manual_seed(0)
    model = Hooked(register)
    plain = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, (X,), dtype=torch.bfloat16)
    for x in (X, 2 * X, X):
        found, wanted = gradient(amp_model, model.a.weight, x), gradient(plain, plain.a.weight, x)
        assert_alike(found, wanted)


def test_a_hook_on_a_tensor_that_was_used_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"after the tensor was used.*test_tensor_hooks.py:\d+"):
        autocastfx.convert(Hooked(nothing, late=a_lambda), (X,))
    model = Hooked(nothing, late=a_lambda)
    wanted = gradient(model, model.a.weight)
    amp_model = autocastfx.enable(model, dtype=torch.bfloat16)
    late = pytest.warns(UncapturedGraphWarning, match="registers a hook on a tensor after the tensor was used")
    with same() if OLD else late:
        assert_alike(gradient(amp_model, model.a.weight), wanted)


def test_removing_a_hook_in_forward_is_refused() -> None:
    with pytest.raises(Exception, match="hook removal"):
        autocastfx.convert(Hooked(removed), (X,))
