"""Tensors of classes of their own: weights that take no other dtype, and inputs whose class a program patches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.capture import dynamo_graph
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from tests.helpers import Net, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
aten = torch.ops.aten


class Packed(Tensor):
    """A weight of int8 with a scale, as packages for quantisation have them: it refuses every other dtype."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Packed:
        return Packed(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype", torch.float32) != torch.float32:
            raise ValueError("the dtype of a packed weight cannot be changed")
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return Packed(func(args[0].codes), args[0].scale)
        return func(*pytree.tree_map_only(Packed, lambda one: one.codes * one.scale, args), **kwargs)


def packed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    codes = torch.randint(-100, 100, (8, 3, 3, 3), dtype=torch.int8)
    model[0].weight = nn.Parameter(Packed(codes, torch.tensor(0.01)), requires_grad=False)
    return model


def test_a_weight_that_takes_no_other_dtype_is_read_in_float32() -> None:
    model, x = packed(), torch.randn(2, 3, 16, 16)
    exact = model(x).detach()
    amp_model = autocastfx.convert(model, (x,), dtype=LOW)
    first, second = (node for node in amp_model.plan.nodes if node.op == "conv2d")
    assert (first.dtype, second.dtype) == ("float32", "bfloat16")
    assert str(first.decision.source) == "forced:tensor-class"
    assert first.decision.reason == "_0_weight is a Packed, which takes no other dtype"
    assert 0 < relative_error(amp_model(x).detach(), exact) < 4 * torch.finfo(LOW).eps
    autocastfx.enable(model, dtype=LOW)
    assert 0 < relative_error(model(x).detach(), exact) < 4 * torch.finfo(LOW).eps


def test_a_graph_that_fails_under_autocast_by_any_error_runs_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no graph of")

    monkeypatch.setattr(dynamo_graph, "_traced", refuse)
    model, x = packed(), torch.randn(2, 3, 16, 16)
    exact = model(x)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning) as told:
        found = model(x)
    assert str(told[-1].message).startswith("the graph fails under torch.autocast (the dtype of a packed weight cannot")
    assert torch.equal(found, exact)
    assert not torch.is_autocast_enabled("cpu")


class Image(Tensor):
    """A class that says nothing of what is computed with it."""


def test_what_a_program_has_put_in_place_of_as_subclass_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Tensor.as_subclass

    def as_subclass(self: Tensor, kind: Any) -> Any:
        made = own(self, kind)
        made.__dict__.update(self.__dict__)
        return made

    monkeypatch.setattr(Tensor, "as_subclass", as_subclass)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), own(torch.randn(2, 3, 8, 8), Image)
    exact = own(model(x), Tensor).detach()
    autocastfx.enable(model, dtype=LOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncapturedGraphWarning)
        found = model(x)
    assert type(found) is Image
    assert 0 < relative_error(own(found, Tensor).detach(), exact) < 4 * torch.finfo(LOW).eps


class Doubled(Tensor):
    """Twice what ``relu`` gives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.relu else found


class Named(Tensor):
    """Gives its name on to the result, and says it there."""

    label: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, Named) and args and hasattr(args[0], "label"):
            found.label = args[0].label
        return found


class Tracked(Tensor):
    """Gives all its attributes on in a way that Dynamo cannot follow."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, Tracked):
            found.__dict__ = dict(args[0].__dict__)
        return found


def adds() -> nn.Module:
    return Net(lambda m, x: torch.relu(m.linear(torch.relu(x))), linear=nn.Linear(16, 16))


@pytest.mark.parametrize("kind", [Image, Doubled])
def test_a_class_whose_function_dynamo_follows_is_converted(kind: Any) -> None:
    torch.manual_seed(0)
    model, x = adds(), torch.randn(4, 16).as_subclass(kind)
    exact = model(x)
    amp_model = autocastfx.convert(model, (x,), dtype=LOW)
    found = amp_model(x)
    assert type(found) is type(exact) is kind
    assert 0 < relative_error(found.as_subclass(Tensor).detach(), exact.as_subclass(Tensor).detach()) < 8e-3
    other = amp_model(x.as_subclass(Tensor))
    assert type(other) is Tensor
    assert 0 < relative_error(other.detach(), model(x.as_subclass(Tensor)).detach()) < 8e-3


@pytest.mark.parametrize("kind", [Image, Doubled])
def test_such_a_class_is_that_of_what_an_enabled_model_gives(kind: Any, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, x = adds(), torch.randn(4, 16).as_subclass(kind)
    exact = model(x)
    autocastfx.enable(model, dtype=LOW)
    found = model(x)
    assert type(found) is kind
    assert 0 < relative_error(found.as_subclass(Tensor).detach(), exact.as_subclass(Tensor).detach()) < 8e-3
    assert not [one for one in recwarn if one.category is UncapturedGraphWarning]


def test_attributes_that_a_class_gives_on_are_those_of_each_call() -> None:
    model = adds()
    amp_model = autocastfx.convert(model, (_named("first"),), dtype=LOW)
    for label in ("first", "second"):
        x = _named(label)
        found, exact = amp_model(x), model(x)
        assert (type(found), found.label) == (type(exact), exact.label) == (Named, label)
        assert 0 < relative_error(found.as_subclass(Tensor).detach(), exact.as_subclass(Tensor).detach()) < 8e-3


def _named(label: str) -> Named:
    made = torch.randn(4, 16).as_subclass(Named)
    made.label = label
    return made


def test_a_class_whose_function_dynamo_cannot_follow_is_refused_by_name() -> None:
    model, x = adds(), torch.randn(4, 16).as_subclass(Tracked)
    with pytest.raises(CaptureError) as told:
        autocastfx.convert(model, (x,), dtype=LOW)
    assert "test_tensor_classes.py:" in str(told.value)
    assert str(told.value).endswith(
        "\nTracked has a __torch_function__ that one graph cannot hold. Give the model plain tensors, "
        "x.as_subclass(torch.Tensor), or convert in place, with autocastfx.enable, which goes on behind such code."
    )
    plain = x.as_subclass(Tensor)
    assert relative_error(autocastfx.convert(model, (plain,), dtype=LOW)(plain).detach(), model(plain).detach()) > 0
