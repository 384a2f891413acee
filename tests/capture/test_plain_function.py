"""Plain functions of tensors are converted as modules; what they read from around them stays right, or is refused."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autocastfx
from autocastfx.capture.plain_function import is_function
from autocastfx.errors import ArgumentTypeError, UnsupportedError

SCALE = 2.0
LAYER = nn.Linear(8, 8)
WEIGHT = torch.randn(8, 8, requires_grad=True)
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float = 0.5) -> dict[str, Tensor]:
    """Attend."""
    weights = (q @ k.mT * scale).softmax(-1)
    return {"out": weights @ v, "weights": weights}


def scaled(x: Tensor) -> Tensor:
    return helper(x) @ x.mT


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def linear(x: Tensor) -> Tensor:
    return LAYER(x)


def calls_linear(x: Tensor) -> Tensor:
    return linear(x).relu()


def summed(*xs: Tensor) -> Tensor:
    return torch.cat(xs).sum()


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w: Tensor) -> None:
        self.w = w


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x @ self.value


def close(a: Any, b: Any) -> bool:
    return torch.allclose(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("given", [True, False])
def test_values_and_gradients_in_both_modes(given: bool) -> None:
    inputs: dict[str, Any] = {"example_inputs": (X, X, X), "example_kwargs": {"scale": 0.3}} if given else {}
    converted = autocastfx.convert(attention, dtype="bfloat16", **inputs)
    assert repr(converted).startswith("AmpModule of attention")
    with torch.no_grad():
        for scale in (0.3, 0.7):
            wanted, result = attention(X, X, v=X, scale=scale), converted(X, X, v=X, scale=scale)
            assert result.keys() == wanted.keys()
            assert all(close(result[key], wanted[key]) and result[key].dtype == torch.float32 for key in wanted)
            assert not result["out"].requires_grad
    ours, theirs = (X.clone().requires_grad_() for _ in range(2))
    converted(ours, ours, ours)["out"].square().sum().backward()
    attention(theirs, theirs, theirs)["out"].square().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert close(ours.grad, theirs.grad)
    assert any(str(node.placement.run) == "low" for node in converted.plan.nodes)
    assert close(converted.eval()(X, X, X)["out"], attention(X, X, X)["out"])
    with pytest.raises(TypeError, match="missing a required argument: 'v'"):
        converted(X, X)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (F.linear, (X, torch.ones(8, 8)), {"bias": torch.ones(8)}),
        (F.layer_norm, (X, (8,)), {}),
        (torch.softmax, (X,), {"dim": -1}),
        (functools.partial(F.softmax, dim=-1), (X,), {}),
        (torch.vmap(helper), (X,), {}),
        (summed, (X, X), {}),
        (Holder(torch.eye(8)).method, (X,), {}),
        (nn.functional.gelu, (X,), {"approximate": "tanh"}),
    ],
)
def test_functions_of_every_kind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert is_function(function)
    for converted in (
        autocastfx.convert(function, args, kwargs, dtype="bfloat16"),
        autocastfx.convert_function(dtype="bfloat16")(function),
    ):
        assert close(converted(*args, **kwargs), function(*args, **kwargs))


def test_losses_and_activations_of_torch_may_be_called() -> None:
    loss, gelu = nn.CrossEntropyLoss(), nn.Sequential(nn.GELU())

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss(gelu(x), y), x

    y = torch.tensor([1, 2, 3, 4])
    result, same = autocastfx.convert(function, (X, y), dtype="bfloat16")(X, y)
    assert close(result, function(X, y)[0])
    assert torch.equal(same, X)


def test_a_number_that_changes_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = autocastfx.convert(scaled, X, dtype="bfloat16")
    assert close(converted(X), scaled(X))
    monkeypatch.setattr(f"{__name__}.SCALE", 5.0)
    assert close(converted(X), X @ X.mT * 5)
    copied = copy.deepcopy(converted)
    factor, settings, space = 2.0, {"factor": 2.0}, SimpleNamespace(factor=2.0)

    def function(x: Tensor) -> Tensor:
        return x * factor * settings["factor"] * space.factor

    closed = autocastfx.convert(function, X, dtype="bfloat16")
    assert close(closed(X), X * 8)
    factor = 3.0
    assert close(closed(X), X * 12)
    settings["factor"] = 3.0
    assert close(closed(X), X * 18)
    space.factor = 3.0
    assert close(closed(X), X * 27)
    assert close(copied(X), X @ X.mT * 5)


def test_a_list_that_a_function_fills_is_filled() -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 3)
        return x * 2

    converted = autocastfx.convert(function, X, dtype="bfloat16", check=False)
    assert not kept
    for count in (1, 2):
        assert close(converted(X), X * 2)
        assert len(kept) == count
        assert close(kept[-1], X * 3)


def inside(value: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that reach ``value``, which multiplies, in different ways; by what the message calls it."""
    several, table, space = [value], {"w": value}, SimpleNamespace(w=value)

    def default(x: Tensor, w: Any = value) -> Tensor:
        return x @ w

    return {
        "closure": lambda x: x @ value,
        "list": lambda x: x @ several[0],
        "dict": lambda x: x @ table["w"],
        "namespace": lambda x: x @ space.w,
        "partial": functools.partial(torch.matmul, other=value),
        "self": Holder(value).method,
        "object": (lambda holder: lambda x: holder.method(x))(Holder(value)),
        "slots": (lambda hidden: lambda x: x @ hidden.w)(Slotted(value)),
        "default": default,
    }


@pytest.mark.parametrize("way", inside(WEIGHT))
def test_a_tensor_with_a_gradient_is_refused_however_it_is_reached(way: str) -> None:
    told = r"reads a tensor from around it that requires a gradient \(\[8, 8\], at .*\)\. .* forward of an nn\.Module"
    with pytest.raises(UnsupportedError, match=told):
        autocastfx.convert(inside(WEIGHT)[way], X, dtype="bfloat16")
    late = autocastfx.convert(inside(WEIGHT)[way], dtype="bfloat16")
    with pytest.raises(UnsupportedError, match=told):
        late(X)
    value = WEIGHT.detach()
    assert close(autocastfx.convert(inside(value)[way], X, dtype="bfloat16")(X), X @ value)


@pytest.mark.parametrize("function", [linear, calls_linear])
def test_a_module_with_parameters_is_refused(function: Callable[..., Any]) -> None:
    told = rf"the function {function.__name__} reads a tensor .* at .*_function\.py:\d+: return LAYER.*no optimizer"
    with pytest.raises(UnsupportedError, match=told):
        autocastfx.convert(function, X)
    late = autocastfx.convert_function(function)
    with pytest.raises(UnsupportedError, match=told):
        late(X)


def test_a_module_that_a_function_calls_keeps_its_mode() -> None:
    drop = nn.Dropout()

    def dropped(x: Tensor) -> Tensor:
        return drop(x)

    converted = autocastfx.convert(dropped, X)
    assert not torch.equal(converted(X), X)
    drop.eval()
    assert torch.equal(converted.train()(X), X)
    drop.train()
    assert not torch.equal(converted.eval()(X), X)


def test_other_functions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"forward is a method of a Linear.*: convert the module"):
        autocastfx.convert(LAYER.forward, X)
    with pytest.raises(UnsupportedError, match=r"scaled is compiled by torch\.compile already: convert the function"):
        autocastfx.convert(torch.compile(scaled), X)


def test_the_decorator() -> None:
    @autocastfx.convert_function
    def plain(x: Tensor) -> Tensor:
        return x @ x.mT

    @autocastfx.convert_function(dtype="bfloat16", op_list="float32")
    def exact(x: Tensor) -> Tensor:
        return x @ x.mT

    assert isinstance(plain, autocastfx.AmpModule)
    assert close(plain(X), X @ X.mT)
    assert torch.equal(exact(X), X @ X.mT)
    assert "matmul" in autocastfx.dump(plain)
    assert torch.equal(torch.compile(exact, backend="eager")(X), X @ X.mT)


def test_wrong_decorations() -> None:
    with pytest.raises(ArgumentTypeError, match=r"takes a function of tensors, not an nn\.Module, which convert takes"):
        autocastfx.convert_function(LAYER)
    with pytest.raises(ArgumentTypeError, match="not str; its options go by keyword"):
        autocastfx.convert_function("bfloat16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentTypeError, match="takes no 'dtyp', but the options of convert: example_inputs, "):
        autocastfx.convert_function(dtyp="bfloat16")(scaled)
    with pytest.raises(UnsupportedError, match=r"Net\.forward is a method, and .*: self is none\. Convert the module"):

        class Net:  # pyright: ignore[reportUnusedClass]
            @autocastfx.convert_function
            def forward(self, x: Tensor) -> Tensor:
                return x

    class Tool:
        @staticmethod
        @autocastfx.convert_function(dtype="bfloat16")
        def double(x: Tensor) -> Tensor:
            return x * 2

    assert torch.equal(Tool.double(X), X * 2)


def test_a_converted_function_pickles() -> None:
    for converted in (autocastfx.convert(scaled, X, dtype="bfloat16"), autocastfx.convert(scaled, dtype="bfloat16")):
        assert close(pickle.loads(pickle.dumps(converted))(X), scaled(X))


def test_calibration_and_the_check_take_functions() -> None:
    converted = autocastfx.convert(scaled, calibrate=[(X,), (2 * X,)], dtype="float16", check=True)
    assert close(converted(X), scaled(X))
