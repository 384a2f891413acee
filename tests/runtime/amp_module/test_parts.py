"""The parts of a converted model are instances of the original's classes, so helpers that look for layers find them."""

from __future__ import annotations

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, update_bn

import autocastfx
from autocastfx.errors import UnsupportedError
from tests.helpers import relative_error

LOW, EPS = torch.bfloat16, torch.finfo(torch.float32).eps


class Scale(nn.Linear):
    """A layer of a user's own, with a method and a setting."""

    def __init__(self, size: int, *, factor: float = 0.5) -> None:
        super().__init__(size, size)
        self.factor, self.names = factor, ["a"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor

    def reset_to(self, value: float) -> None:
        nn.init.constant_(self.weight, value * self.factor)


class Registered(nn.Module):
    """A class whose subclasses are counted: none is made of it."""

    subclasses = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.subclasses += 1


class Counted(Registered, nn.Flatten):  # pyright: ignore[reportUnsafeMultipleInheritance]
    def forward(self, x: Tensor) -> Tensor:
        return nn.Flatten.forward(self, x)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Counted(), Scale(4 * 36), nn.Dropout(0.5))


X = torch.linspace(-1, 1, 4 * 3 * 64).reshape(4, 3, 8, 8).sin()


def test_parts_are_found_by_class() -> None:
    model = made()
    amp_model = autocastfx.convert(model, (X,), dtype=LOW)
    subclasses = Registered.subclasses
    for name, module in model.named_children():
        part = amp_model.get_submodule(name)
        assert part is module
    assert Registered.subclasses == subclasses
    for one in (copy.deepcopy(amp_model), pickle.loads(pickle.dumps(amp_model))):
        assert isinstance(one.get_submodule("4"), Scale)
        assert (one.get_submodule("4").in_features, one.get_submodule("1").momentum) == (144, 0.1)
        one.eval()
        assert torch.equal(one(X), amp_model.eval()(X))


def test_batch_norms_are_updated_as_the_originals() -> None:
    model, same = made(), made()
    amp_model = autocastfx.convert(model, (X,), op_list="float32")
    batches = [X, X * 2, X - 1]
    update_bn(batches, amp_model)
    update_bn(batches, same)
    assert relative_error(amp_model.get_buffer("1.running_var"), same[1].running_var) < 4 * EPS
    assert amp_model.get_submodule("1").momentum == model[1].momentum == 0.1
    averaged = AveragedModel(amp_model)
    update_bn(batches, averaged)
    assert relative_error(averaged.module.get_buffer("1.running_var"), same[1].running_var) < 4 * EPS


def test_an_initialization_by_class_or_method_reaches_the_parameters() -> None:
    amp_model = autocastfx.convert(made(), (X,), dtype=LOW)

    def start(module: nn.Module) -> None:
        if isinstance(module, Scale):
            module.reset_to(2.0)
        elif module.__class__.__name__.find("Conv") != -1:
            nn.init.zeros_(module.weight)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    nn.init.zeros_(amp_model.get_parameter("1.weight"))
    amp_model.apply(start)
    held = dict(amp_model.named_parameters())
    assert torch.equal(held["4.weight"], torch.ones(144, 144))
    assert held["0.weight"].abs().sum() == 0
    assert torch.equal(held["1.weight"], torch.ones(4))
    decayed = [p for m in amp_model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) for p in m.parameters()]
    assert len(decayed) == 4


def test_a_setting_of_a_part_is_the_originals() -> None:
    model = made().eval()
    amp_model = autocastfx.convert(model, (X,), op_list="float32")
    amp_model.get_submodule("4").factor = 2.0
    assert model[4].factor == 2.0
    assert torch.equal(amp_model(X), model(X))
    model[4].factor = 3.0
    amp_model(X)
    assert amp_model.get_submodule("4").factor == 3.0
    loaded = pickle.loads(pickle.dumps(amp_model))
    loaded.get_submodule("4").factor = 4.0
    model[4].factor = 4.0
    assert torch.equal(loaded(X), model(X))


def test_a_part_that_is_replaced_is_the_models() -> None:
    model = nn.Sequential(made(), nn.Linear(144, 2)).eval()
    amp_model = autocastfx.convert(model, (X,), dtype=LOW)
    amp_model(X)
    setattr(amp_model, "1", nn.Linear(144, 3))
    assert amp_model(X).shape == (4, 3)
    assert relative_error(amp_model(X), model(X)) < 4 * torch.finfo(LOW).eps
    setattr(amp_model.get_submodule("0"), "4", nn.Identity())
    assert relative_error(amp_model(X), model(X)) < 4 * torch.finfo(LOW).eps
    nn.SyncBatchNorm.convert_sync_batchnorm(amp_model)
    assert isinstance(model[0][1], nn.SyncBatchNorm)
    amp_model.get_submodule("0").further = nn.Identity()
    assert isinstance(model[0].further, nn.Identity)
    assert torch.equal(copy.deepcopy(amp_model)(X), amp_model(X))


def test_a_forward_that_a_part_gets_is_the_models() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    amp_model = autocastfx.convert(model, x, dtype=LOW)
    before = amp_model(x)
    part = getattr(amp_model, "0")
    part.forward = MethodType(lambda self, x: F.linear(x, -self.weight, -self.bias), part)
    for called in (amp_model, model):
        assert relative_error(called(x), -before) < 4 * torch.finfo(LOW).eps
    assert relative_error(part(x), model[0](x)) < 4 * torch.finfo(LOW).eps
    del part.forward
    assert torch.equal(amp_model(x), before)


def test_a_parametrization_of_a_view_is_refused_before_it_changes_anything() -> None:
    amp_model = autocastfx.convert(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8), dtype=LOW)
    with pytest.raises(UnsupportedError, match=r"get_submodule"):
        parametrizations.weight_norm(getattr(amp_model, "0"))
    assert set(amp_model.state_dict()) == {"0.weight", "0.bias"}
    parametrizations.weight_norm(amp_model.get_submodule("0"))
    amp_model(torch.randn(4, 8))


def test_a_part_switches_modes_as_its_class_does() -> None:
    class Teacher(nn.Sequential):
        def train(self, mode: bool = True) -> Teacher:
            super().train(mode)
            self[1].eval()
            return self

    model = nn.Sequential(Teacher(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4))
    amp_model = autocastfx.convert(model, (torch.ones(2, 4),), dtype=LOW)
    amp_model.get_submodule("0").train()
    assert [m.training for m in amp_model.get_submodule("0").modules()] == [True, True, False]


def test_parametrized_layers_are_found_by_the_class_below() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    amp_model = autocastfx.convert(model, (torch.ones(2, 4),), dtype=LOW)
    assert type(amp_model.get_submodule("0")).__name__ == "Linear"
    assert torch.equal(amp_model(torch.ones(2, 4)), copy.deepcopy(amp_model)(torch.ones(2, 4)))
