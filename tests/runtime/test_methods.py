"""Methods of a converted model are those of the model, and what they call is converted."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from tests.helpers import relative_error

convert = functools.partial(autocastfx.convert, check=False)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 8)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 4), nn.Linear(6, 4)

    def encode_image(self, x: torch.Tensor) -> torch.Tensor:
        return self.image(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.encode_image(x) @ self.text(y).mT


def test_a_part_and_a_method_that_calls_one_are_converted() -> None:
    model, x = Pair(), torch.randn(3, 8)
    amp_model = convert(model, (x, torch.randn(2, 6)), dtype=torch.bfloat16)
    expected = convert(model.image, (x,), dtype=torch.bfloat16)(x)
    restored = pickle.loads(pickle.dumps(amp_model))
    for call in (amp_model.encode_image, amp_model.image, restored.image, restored.encode_image):
        assert torch.equal(call(x), expected)


class Special(nn.Module):
    """Has a call of its own, and other special methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleDict({"first": nn.Linear(8, 8), "last": nn.Linear(8, 4)}), 0

    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"logits": super().__call__(x * 3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["last"](self.layers["first"](x).relu())

    def __setitem__(self, name: str, layer: nn.Module) -> None:
        self.layers[name] = layer

    def __reversed__(self) -> Any:
        return reversed(list(self.layers.values()))

    def __enter__(self) -> Any:
        return self.eval()

    def __exit__(self, *_: object) -> None:
        self.train()


def test_a_model_has_a_truth_value() -> None:
    amp_model = convert(nn.Linear(8, 4), dtype="bfloat16")
    assert amp_model
    assert not hasattr(amp_model, "__len__")
    assert not convert(nn.Sequential(), dtype="bfloat16")


@pytest.mark.parametrize("lazily", [False, True])
def test_a_call_of_the_models_own_runs(lazily: bool, x: torch.Tensor) -> None:
    model = Special()
    amp_model = convert(*(model, x)[: 1 if lazily else 2], dtype="bfloat16")
    expected, model.calls = model(x)["logits"], 0
    assert 0 < relative_error(amp_model(x)["logits"], expected) < 0.02
    assert model.calls == 1
    assert 0 < relative_error(nn.Sequential(amp_model)(x)["logits"], expected) < 0.02


def test_special_methods_are_the_models(x: torch.Tensor) -> None:
    model = Special()
    amp_model = convert(model, x, dtype="bfloat16")
    with amp_model as entered:
        assert entered is amp_model
        assert not model.training
    assert model.training
    amp_model["last"] = amp_model.layers["first"]
    assert model.layers["last"] is model.layers["first"]
    assert [type(layer) for layer in reversed(amp_model)] == [type(amp_model.layers["first"])] * 2


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.more = layer, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.more(x)


@pytest.mark.parametrize(
    "put",
    [
        lambda amp_model: setattr(amp_model[0], "0", Around(amp_model[0][0])),
        lambda amp_model: amp_model.__setitem__(1, nn.Sequential(Around(amp_model[1]))),
        lambda amp_model: amp_model.append(Around(amp_model[1])),
        lambda amp_model: amp_model.add_module("1", Around(amp_model[1])),
        lambda amp_model: amp_model.append(amp_model[1]),
    ],
    ids=["an attribute", "an item", "a method", "a method of Module", "itself"],
)
def test_what_is_put_around_a_part_holds_the_models_own(put: Any, x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    amp_model = convert(model, x, dtype="bfloat16")
    put(amp_model)
    assert not any(isinstance(one, autocastfx.AmpModule) for one in model.modules())
    assert 0 < relative_error(amp_model(x), model(x)) < 0.02
