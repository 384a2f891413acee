"""Code that Dynamo skips in silence, as it has skipped it in another model or is switched off, is told too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx import CompileBackend
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from tests.helpers import relative_error
from tests.integrations.test_skipped_code import Whole

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
X = torch.linspace(-2, 2, 40).reshape(5, 8)


class Steps(nn.Module):
    """Adds a step as long as the values say so: no graph holds that, and Dynamo skips the whole function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
            if x.sum() > 0:
                x = x * 0.5
        return x


class StepsInEvaluation(Steps):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
            if not self.training and x.sum() > 0:
                x = x * 0.5
        return x


def shrink(x: Tensor, layer: nn.Module) -> Tensor:
    for _ in range(3):
        x = layer(x)
        if x.sum() > 0:
            x = x * 0.5
    return x


class StepsOfAFunction(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return shrink(x, self.layer)


class Broken(nn.Module):
    """Breaks the graph between two layers, which are captured all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def enabled(kind: Callable[[], nn.Module], **options: Any) -> nn.Module:
    return autocastfx.enable(Whole(kind()), dtype=LOW, inner="eager", **options)


@pytest.mark.parametrize("kind", [Steps, StepsOfAFunction])
def test_each_model_is_told_of_code_that_dynamo_skips_in_all(kind: Callable[[], nn.Module]) -> None:
    for _ in range(3):
        model = enabled(kind)
        with pytest.warns(UncapturedGraphWarning, match=r"cannot capture \w+ at .*runs under torch\.autocast"):
            model(X)
        model(X)
        assert len(model._compiled_call_impl.backend.skipped) >= 1  # type: ignore[union-attr]
    for _ in range(2):
        model = enabled(kind, uncaptured="error")
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"cannot capture \w+ at"):
                model(X)


def test_code_that_others_have_compiled_and_dynamo_skips_is_told() -> None:
    torch.compile(Whole(Steps()), backend="eager")(X)
    with pytest.warns(UncapturedGraphWarning, match=r"cannot capture forward at .*runs under torch\.autocast"):
        enabled(Steps)(X)


def test_a_model_is_told_of_what_dynamo_skips_since_another_models_call() -> None:
    first, second = enabled(StepsInEvaluation), enabled(StepsInEvaluation)
    exact = copy.deepcopy(second)
    exact._compiled_call_impl = None
    for model in (first, second):
        model(X)
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward"):
        first.eval()(X)
    found = second(X)
    assert 0 < relative_error(found.detach(), exact(X).detach()) < 4 * torch.finfo(LOW).eps
    runs = second._compiled_call_impl.backend.runs  # type: ignore[union-attr]
    second(X)
    assert second._compiled_call_impl.backend.runs == runs + 1  # type: ignore[union-attr]
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward"):
        second.eval()(X)


def test_nine_models_do_not_share_a_limit_of_graphs_behind_a_break() -> None:
    for _ in range(9):
        model = enabled(Broken)
        model(X)
        backend = model._compiled_call_impl.backend  # type: ignore[union-attr]
        runs = backend.runs
        model(X)
        assert (backend.skipped, len(backend.graphs)) == ([], 4)
        assert backend.runs == runs + 4


def told_once(model: nn.Module, around: Callable[[], AbstractContextManager[Any]], message: str) -> Tensor:
    with around(), pytest.warns(UncapturedGraphWarning, match=message):
        model(X)
    with around():
        return model(X).detach()


def test_a_model_under_a_dispatch_mode_runs_under_autocast_there_and_that_is_told() -> None:
    model = enabled(nn.Identity)
    exact = copy.deepcopy(model)
    exact._compiled_call_impl = None
    found = told_once(
        model, lambda: FlopCounterMode(display=False), r"a TorchDispatchMode.* Whole runs under torch\.auto"
    )
    assert 0 < relative_error(found, exact(X).detach()) < 4 * torch.finfo(LOW).eps
    model(X)  # converted, and not told
    assert len(model._compiled_call_impl.backend.graphs) == 1  # type: ignore[union-attr]
    model = enabled(nn.Identity, uncaptured="error")
    with (
        FlopCounterMode(display=False),
        pytest.raises(CaptureError, match=r"torch\.compile is off, by a TorchDispatchMode"),
    ):
        model(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*to a Python boolean:torch.jit.TracerWarning")
def test_a_trace_of_a_model_or_a_part_runs_under_autocast_and_that_is_told() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x, exact = torch.randn(4, 16), copy.deepcopy(model)
    autocastfx.enable(model, dtype=LOW)
    for part, right in ((model, exact), (model[0], exact[0])):
        with pytest.warns(UncapturedGraphWarning, match=r"is off, by torch\.jit\.trace .* runs under torch\.autocast"):
            traced: Any = torch.jit.trace(part, x)
        error = relative_error(traced(x).detach(), right(x).detach())
        assert 0 < error < 4 * torch.finfo(LOW).eps


def test_a_stance_without_compilation_is_told() -> None:
    model = enabled(nn.Identity)
    model(X)
    eager = torch.compiler.set_stance
    found = told_once(model, lambda: eager("force_eager"), r"set_stance\('force_eager'\): Whole runs in float32")
    exact = copy.deepcopy(model)
    exact._compiled_call_impl = None
    assert torch.equal(found, exact(X))


def test_a_call_without_any_work_is_no_concern() -> None:
    class Maybe(nn.Linear):
        def forward(self, x: Tensor, *, is_on: bool = True) -> Tensor:
            return super().forward(x) if is_on else x

    model = autocastfx.enable(Maybe(8, 8), dtype=LOW, inner="eager")
    model(X)
    assert model(X, is_on=False) is X


@pytest.mark.parametrize("by_name", [True, False])
def test_a_backend_of_torch_compile_tells_of_skipped_code_at_its_first_call(by_name: bool) -> None:
    options: dict[str, Any] = {"backend": CompileBackend(dtype=LOW, inner="eager")}
    if by_name:
        options = {"backend": "autocastfx", "options": {"dtype": LOW, "inner": "eager"}}
    with pytest.warns(
        UncapturedGraphWarning, match=r"cannot capture forward at .*test_skipped_before\.py:\d+ \(.*float32"
    ):
        torch.compile(Whole(Steps()), **options)(X)
    with pytest.warns(UncapturedGraphWarning, match="cannot capture shrink"):
        torch.compile(StepsOfAFunction(), **options)(X)


def test_other_backends_and_whole_graphs_are_no_concern() -> None:
    backend = CompileBackend(dtype=LOW, inner="eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UncapturedGraphWarning)
        torch.compile(Whole(Steps()), backend="eager")(X)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(Whole(Steps()), backend=backend, fullgraph=True)(X)
    assert [one for one in seen if one.category is UncapturedGraphWarning] == []


class Turned(torch.autograd.Function):
    """Has a gradient that is not its forward's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def row(self, x: Tensor) -> Tensor:
        return Turned.apply(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.row)(x)


class MappedTwice(Mapped):
    def row(self, x: Tensor) -> Tensor:
        return torch.func.vmap(Turned.apply)(self.layer(x)[None])[0]


class Drawn(Mapped):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.row(row).sum()))(x) @ self.layer.weight.mT


@pytest.mark.parametrize("kind", [Mapped, MappedTwice, Drawn])
def test_the_backward_of_a_function_inside_a_transform_is_not_lost(kind: type[Mapped]) -> None:
    model = kind()
    exact = copy.deepcopy(model)
    exact(X).square().sum().backward()
    autocastfx.enable(model, dtype=LOW, inner="eager")
    with pytest.warns(UncapturedGraphWarning, match="cannot capture"):
        model(X)
    for _ in range(2):
        model.zero_grad()
        model(X).square().sum().backward()
        found, wanted = model.layer.weight.grad, exact.layer.weight.grad
        assert found is not None
        assert wanted is not None
        assert relative_error(found, wanted) < 8 * torch.finfo(LOW).eps
