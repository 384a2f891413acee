"""Python functions and autograd functions that a list names stay one node, in a view and in an enabled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import CompileBackend, OpList
from autocastfx.errors import BannedOpError, CaptureError
from autocastfx.integrations.backend import backend_of
from tests.helpers import relative_error

X = torch.linspace(-4, 4, 12).view(3, 4)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float = 1.0) -> Tensor:
        return x.tanh() * by

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3, None


triple = Triple.apply  # a name bound when a module is imported


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 5


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 7, None


FACTOR = {0: 2.0}


def scaled(x: Tensor, *, by: float = 1.0) -> Tensor:
    return torch.sin(x) * by * FACTOR[0]


def parts(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x + 1, {"product": x * 2, "list": [x, 3, None]}


def of_module(x: Tensor, module: nn.Module) -> Tensor:
    return x * len(list(module.parameters()))


class Holder:
    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x.cos()


def inside(x: Tensor) -> Tensor:
    return scaled(x) + 1


class Between(nn.Module):
    """Something between two linear layers."""

    def __init__(self, function: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self, self.a(x)))


def nested(m: Between, x: Tensor) -> Tensor:
    total, rest = parts(x)
    return total + rest["product"] + rest["list"][0] * rest["list"][1]


WHOLE: dict[str, tuple[Callable[[Between, Tensor], Tensor], str]] = {
    "function": (lambda m, x: scaled(x), f"{__name__}.scaled"),
    "arguments": (lambda m, x: scaled(x, by=3.0), f"{__name__}.scaled"),
    "a size": (lambda m, x: scaled(x, by=x.shape[0]), f"{__name__}.scaled"),
    "inside another": (lambda m, x: inside(x), f"{__name__}.scaled"),
    "nested results": (nested, f"{__name__}.parts"),
    "static method": (lambda m, x: Holder.static(x), f"{__name__}.Holder.static"),
    "torch's": (lambda m, x: nn.functional.normalize(x), "torch.nn.functional.normalize"),
    "autograd": (lambda m, x: Triple.apply(x, 2.0), f"{__name__}.Triple"),
    "autograd, bound": (lambda m, x: triple(x), f"{__name__}.Triple"),
    "autograd, in place": (lambda m, x: Marked.apply(x * 1), f"{__name__}.Marked"),
}


def converted(model: nn.Module, lists: Any, way: str) -> nn.Module:
    if way == "convert":
        return autocastfx.convert(model, X, dtype="bfloat16", op_list=lists)
    return autocastfx.enable(model, dtype="bfloat16", op_list=lists, inner=way)


def placements(model: nn.Module, op: str) -> list[tuple[str, str]]:
    """(category, precision) of the nodes of an op."""
    backend = backend_of(model)
    plans = [model.plan] if backend is None else [graph.plan for graph in backend.graphs]
    return [(str(n.decision.category), str(n.placement.run)) for plan in plans for n in plan.nodes if n.op == op]


def gradients(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    y = model(x)
    named = [x, *model.parameters()]
    return [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), named)]


@pytest.mark.parametrize("way", ["convert", "eager"])
@pytest.mark.parametrize("name", WHOLE)
def test_what_a_list_names_is_one_node(name: str, way: str) -> None:
    function, path = WHOLE[name]
    expected = gradients(Between(function))
    denied = converted(Between(function), OpList.of({"deny": [path]}), way)
    assert all(map(torch.equal, gradients(denied), expected))
    assert placements(denied, path) == [("deny", "float32")]
    allowed = converted(Between(function), ["bfloat16", OpList.of({"allow": [path]})], way)
    assert all(relative_error(r, e) < 0.05 for r, e in zip(gradients(allowed), expected, strict=True) if e.any())
    assert placements(allowed, path) == [("allow", "low")]


def test_other_backends_compile_it() -> None:
    function, path = WHOLE["autograd"]
    model = converted(Between(function), OpList.of({"deny": [path]}), "aot_eager")
    assert all(map(torch.allclose, gradients(model), gradients(Between(function))))
    assert placements(model, path) == [("deny", "float32")]


def test_a_view_keeps_autograd_functions_that_no_list_names() -> None:
    function, path = WHOLE["autograd, in place"]
    model = converted(Between(function), OpList(), "convert")
    assert placements(model, path) == [("keep", "float32")]
    assert all(map(torch.equal, gradients(model), gradients(Between(function))))


def test_one_that_gets_a_module_keeps_its_backward() -> None:
    def run(m: Between, x: Tensor) -> Tensor:
        return OfModule.apply(x, m.b)

    assert all(map(torch.equal, gradients(converted(Between(run), OpList(), "convert")), gradients(Between(run))))


def test_what_a_function_reads_from_around_it_is_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    function, path = WHOLE["function"]
    model = converted(Between(function), OpList.of({"deny": [path]}), "convert")
    monkeypatch.setitem(FACTOR, 0, 5.0)
    assert torch.equal(model(X), Between(function)(X))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
def test_functions_that_no_list_names_are_traced() -> None:
    function, path = WHOLE["function"]
    for way in ("convert", "eager"):
        model = converted(Between(function), OpList(), way)
        model(X)
        assert placements(model, path) == []


def test_a_call_with_an_object_is_refused_by_name() -> None:
    model = Between(lambda m, x: of_module(x, m.b))
    with pytest.raises(CaptureError, match=rf"an op list names {__name__}\.of_module, and this call of it gets an obj"):
        converted(model, OpList.of({"deny": [f"{__name__}.of_module"]}), "convert")


@pytest.mark.parametrize("way", ["convert", "eager"])
def test_it_can_be_banned(way: str) -> None:
    function, path = WHOLE["autograd"]
    lists = OpList.of({"ban": [{"reason": "no rounding", "ops": [path]}]})
    with pytest.raises(BannedOpError, match=r"Triple.*no rounding"):
        converted(Between(function), lists, way)(X)


def test_two_backends_keep_what_each_names() -> None:
    function, path = WHOLE["function"]
    one, other = Between(function), Between(function)
    named = CompileBackend(inner="eager", op_list=OpList.of({"deny": [path]}))
    named.compile(one)
    CompileBackend(inner="eager", op_list=OpList()).compile(other)
    for model in (one, other):
        model(X)
    assert (len(placements(one, path)), len(placements(other, path))) == (1, 0)
