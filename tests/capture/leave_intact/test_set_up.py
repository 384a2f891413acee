"""What a model does once, in its first call, breaks no graph: it is done before the model is captured."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Recording(nn.Module):
    """Installs hooks in its first call, under a lock, as transformers does to record hidden states."""

    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.is_ready = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen: list[Tensor] = []
        if not self.__dict__.get("hooked", False):
            with Recording.lock:
                for layer in self.layers:
                    layer.register_forward_hook(lambda module, args, output: output * 2)
                self.hooked = True
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return (x, *seen)


class Configured(nn.Module):
    """Reads a file in its first call, as what another thread may do as well."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.path, self.lock = nn.Linear(8, 8), path, threading.RLock()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self.__dict__:
            with self.lock, self.path.open() as file:
                self.scale = json.load(file)["scale"]
        self.calls += 1
        return self.layer(x) * self.scale


class Reading(Configured):
    """Reads it without a lock."""

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self.__dict__:
            with self.path.open() as file:
                self.scale = json.load(file)["scale"]
        return self.layer(x) * self.scale


def near(ours: Any, other: Any) -> None:
    torch.testing.assert_close(ours, other, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("is_called_before", [False, True])
def test_hooks_of_the_first_call(is_called_before: bool) -> None:
    """The graph is that of a model that has been called before, and each hook is there once."""
    model, plain = Recording(), Recording()
    if is_called_before:
        model(X)
    amp = autocastfx.convert(model, (X,), dtype="bfloat16")
    near(amp(X), plain(X))
    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1]
    near(model(X), plain(X))


def test_numbers_that_the_first_call_reads(tmp_path: Path) -> None:
    """They stay; what the call changes besides does not."""
    path = tmp_path / "config.json"
    path.write_text('{"scale": 3.0}')
    model = Configured(path)
    amp = autocastfx.convert(model, (X,), dtype="bfloat16")
    assert model.scale == 3.0
    assert model.get_buffer("calls") == 0
    near(amp(X), Configured(path)(X))
    assert model.get_buffer("calls") == 1
    with pytest.raises(CaptureError, match="call the model once"):
        autocastfx.convert(Reading(path), (X,), dtype="bfloat16")


class Unseen(nn.Module):
    """Makes a tensor of its weight in the first call, in code that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        if "norm" not in self.__dict__:
            with self.lock:
                self.norm = self.layer.weight.norm()
        return self.layer(x) / self.norm


class Breaking(Recording):
    """Breaks the graph in each call."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * float(str(x.sum().item() > 0) == "True")
        return super().forward(x)


@pytest.mark.parametrize("model", [Unseen(), Breaking()])
def test_what_is_refused_leaves_the_model_as_it_was(model: nn.Module) -> None:
    """A tensor of the first call would be made of copies; and what breaks every call is refused as before."""
    before = {name: (dict(vars(module)), len(module._forward_hooks)) for name, module in model.named_modules()}
    with pytest.raises(CaptureError, match="in one graph"):
        autocastfx.convert(model, (X,), dtype="bfloat16")
    after = {name: (dict(vars(module)), len(module._forward_hooks)) for name, module in model.named_modules()}
    assert {n: (m.keys(), hooks) for n, (m, hooks) in before.items()} == {
        n: (m.keys(), h) for n, (m, h) in after.items()
    }


class Interrupted(Recording):
    """Is interrupted when it has set itself up."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        super().forward(x)
        raise KeyboardInterrupt


class Failing(Recording):
    """Fails when it has set itself up."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*super().forward(x), x @ x)


@pytest.mark.parametrize(("kind", "error"), [(Interrupted, KeyboardInterrupt), (Failing, CaptureError)])
def test_a_first_call_that_does_not_end_adds_nothing(kind: type[Recording], error: type[BaseException]) -> None:
    model = kind()
    with pytest.raises(error):
        autocastfx.convert(model, (X,), dtype="bfloat16")
    assert "hooked" not in vars(model)
    assert [len(layer._forward_hooks) for layer in model.layers] == [0, 0]


class OtherMode(nn.Module):
    """Breaks the graph in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.sum() > 100:
            return x
        return self.layer(x)


def test_a_mode_that_cannot_be_captured_is_told_where_it_is_called() -> None:
    amp = autocastfx.convert(OtherMode().eval(), (X,), dtype="bfloat16")
    assert amp(X).shape == X.shape
    with pytest.raises(CaptureError, match="train mode"):
        amp.train()(X)
