"""A converted model switches between training and evaluation as the original does."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Distil(nn.Module):
    """A student, and a teacher that its ``train`` keeps in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 4)
        self.teacher = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
        self.teacher.requires_grad_(requires_grad=False)

    def train(self, mode: bool = True) -> Distil:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.student(x) - self.teacher(x)).square().mean()


class Switching(nn.Module):
    """Its ``train`` freezes, and sets an attribute and a buffer that forward reads; dropout stays on in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("switches", torch.zeros(()))
        self.scale = 1.0

    def train(self, mode: bool = True) -> Switching:
        super().train(mode)
        self.scale = 1.0 if mode else 2.0
        self.get_buffer("switches").add_(1)
        self.norm.eval().requires_grad_(requires_grad=False)
        return self

    def eval(self) -> Switching:
        super().eval()
        self.drop.train()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.a(x))) * self.scale


class Plain(nn.Module):
    """A backbone with a batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: m.training for name, m in model.named_modules() if name not in ("_variants", "autocastfx_call")}


def convert(model: nn.Module, **options: Any) -> Any:
    return autocastfx.convert(model, (X,), dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("saved", [False, True])
def test_the_original_decides_what_train_switches(saved: bool) -> None:
    amp_model = convert(Distil().train())
    if saved:
        amp_model = pickle.loads(pickle.dumps(amp_model))
    statistics = amp_model.get_buffer("teacher.1.running_mean").clone()
    for mode in (True, False, True):
        assert amp_model.train(mode) is amp_model
        assert modes(amp_model) == modes(Distil().train(mode))
        amp_model(X)
    assert torch.equal(amp_model.get_buffer("teacher.1.running_mean"), statistics)
    assert len(amp_model.variants) == 1  # for the teacher, the one that asks for its mode, it is the same


def test_a_switch_that_changes_more_than_modes_is_made_when_it_is_asked_for() -> None:
    model = Switching().eval()
    switches = model.get_buffer("switches").item()
    amp_model = convert(model)
    assert modes(model) == modes(amp_model) == modes(Switching().eval())
    assert model.get_buffer("switches").item() == switches
    assert model.scale == 2.0
    amp_model.train()
    assert (model.scale, model.get_buffer("switches").item()) == (1.0, switches + 1)
    assert modes(model) == modes(amp_model) == modes(Switching().train())
    assert not model.norm.weight.requires_grad
    amp_model.drop.eval()
    torch.testing.assert_close(amp_model(X), model.norm(model.a(X)), atol=0.02, rtol=0.02)
    amp_model.eval()
    assert modes(amp_model) == modes(Switching().eval())


def test_weights_stored_in_16_bits_keep_the_modes_of_evaluation() -> None:
    amp_model = convert(Switching(), weights="low")
    assert modes(amp_model) == modes(Switching().eval())
    assert amp_model(X).shape == (4, 8)


def test_modes_are_those_of_the_model() -> None:
    model = Plain()
    amp_model = convert(model)
    model.backbone.eval()
    statistics = model.backbone.get_buffer("1.running_mean").clone()
    amp_model(X)
    assert torch.equal(model.backbone.get_buffer("1.running_mean"), statistics)
    amp_model.train()
    assert all(modes(amp_model).values())
    model.eval()
    amp_model(X)
    assert not any(modes(amp_model).values())
    model.train()
    model.backbone.eval()
    amp_model(X)
    assert modes(amp_model) == modes(model)
    amp_model.eval()
    amp_model.backbone.train()
    amp_model(X)
    assert modes(amp_model)["backbone.1"]
    assert not modes(amp_model)["head"]


class Fusing(Plain):
    """In evaluation it has one module less."""

    def train(self, mode: bool = True) -> Fusing:
        super().train(mode)
        if not mode:
            self.backbone = nn.Sequential(self.backbone[0])
        return self


def test_a_switch_that_removes_modules_is_followed() -> None:
    model = Fusing()
    amp_model = convert(model)
    torch.testing.assert_close(amp_model.eval()(X), model.head(model.backbone[0](X)), atol=0.02, rtol=0.02)
    assert "batch_norm" not in amp_model.code
    assert list(amp_model.state_dict()) == list(model.state_dict())
