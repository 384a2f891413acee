"""Enabling a model leaves the code of others alone: what they have compiled, and what they compile themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import autocastfx
from autocastfx import CompileBackend
from autocastfx.errors import UncapturedGraphWarning
from tests.integrations.skipped_code.test_skipped_before import Broken

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.linspace(-2, 2, 40).reshape(5, 8)


def _enabled(model: nn.Module) -> CompileBackend:
    backend = autocastfx.backend_of(autocastfx.enable(model, dtype=torch.bfloat16))
    assert backend is not None
    return backend


@pytest.mark.parametrize("kind", [Broken, lambda: nn.Linear(8, 8)], ids=["broken", "whole"])
def test_no_other_function_is_compiled_again(kind: Callable[[], nn.Module]) -> None:
    """Also not one that has as many graphs as Dynamo allows, nor a model with the same code."""
    many = torch.compile(torch.cos, backend="eager", dynamic=False)
    functions = [torch.compile(Broken(), backend="eager"), torch.compile(torch.sin, backend="eager")]
    sizes = [torch.ones(size) for size in range(2, 5)]

    def call_all() -> int:
        before = counters["stats"]["unique_graphs"]
        for one in (*((many, size) for size in sizes), *((function, X) for function in functions)):
            one[0](one[1])
        return counters["stats"]["unique_graphs"] - before

    with torch._dynamo.config.patch(recompile_limit=2):
        call_all()
        model = kind()
        _enabled(model)
        model(X)
        assert call_all() == 0


def test_many_models_with_the_same_code_are_captured_as_the_first() -> None:
    with torch._dynamo.config.patch(accumulated_recompile_limit=2, recompile_limit=2):
        for _ in range(4):
            model = Broken()
            backend = _enabled(model)
            model(X)
            assert (len(backend.graphs), backend.skipped) == (2, [])


class Helped(nn.Module):
    """Calls a function that the program compiles itself, where Dynamo captures nothing."""

    def __init__(self, helper: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.helper = nn.Linear(8, 8), helper

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.helper(self.layer(x))
            if x.sum() > 1e9:
                x = x * 0.5
        return x


def test_a_function_that_the_program_compiles_keeps_its_graphs_where_its_caller_is_not_captured() -> None:
    runs: list[Any] = []

    def count(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            runs.append(given)
            return module.forward(*given)

        return run

    @torch.compile(backend=count)
    def helper(x: Tensor) -> Tensor:
        return x.sin() * 2

    model = Helped(helper)
    _enabled(model)
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward"):
        model(X)
    runs.clear()
    model(X)  # the first one in a region of torch.autocast, in which backwards are tried
    model(X)
    helper(X)
    assert len(runs) == 5


def read_if(x: Tensor, *, is_ready: bool) -> Tensor:
    if not is_ready:
        raise KeyError("not yet")
    return x


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_ready = nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if x.sum() > 1e9:
            x = x * 0.5
        return read_if(self.layer(x), is_ready=self.is_ready)


def test_what_is_skipped_in_a_call_that_fails_is_told_in_the_next() -> None:
    model = Failing()
    backend = _enabled(model)
    with pytest.raises(KeyError):
        model(X)
    model.is_ready = True
    with pytest.warns(UncapturedGraphWarning, match="cannot capture"):
        model(X)
    assert backend.skipped


def test_a_module_that_two_models_share_runs_as_each_of_them_calls_it() -> None:
    shared = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    first, second = nn.Sequential(shared, nn.Linear(8, 8)), Helped(shared)
    of_first, of_second = _enabled(first), _enabled(second)
    first(X)
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward"):
        second(X)
    runs = of_first.runs
    second(X)
    assert (of_first.runs, len(of_first.graphs)) == (runs, 1)
    assert of_second.skipped
    first(X)
    assert of_first.runs == runs + 1
