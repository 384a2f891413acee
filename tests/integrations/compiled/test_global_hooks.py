"""Hooks on every module of the process run in calls of models converted before, and go when they are removed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as every

import autocastfx

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    return output * 2 if isinstance(module, nn.Linear) else None


def doubled_before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    return (inputs[0] * 2,) if isinstance(module, nn.Linear) else None


HOOKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "forward": (every.register_module_forward_hook, doubled),
    "forward pre": (every.register_module_forward_pre_hook, doubled_before),
}


@pytest.mark.parametrize("way", ["convert", "enable"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_on_every_module_runs_as_long_as_it_is_there(name: str, way: str) -> None:
    register, hook = HOOKS[name]
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    amp_model: Any = getattr(autocastfx, way)(model, dtype="bfloat16")
    before = amp_model(X)
    for _ in range(2):
        handle = register(hook)
        try:
            hooked = amp_model(X)
        finally:
            handle.remove()
        assert not hooked.equal(before)
        assert amp_model(X).equal(before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that Dynamo looks at
def test_a_hook_on_the_gradients_of_every_module_runs() -> None:
    plain, seen = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), list[str]()
    model = autocastfx.enable(copy.deepcopy(plain), dtype="bfloat16")
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    handle = every.register_module_full_backward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        plain(x).sum().backward()
        model(x).sum().backward()
    finally:
        handle.remove()
    assert seen[:4] == seen[4:]
    assert len(seen) == 8
