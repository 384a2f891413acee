"""Where a hook keeps Dynamo from capturing code, the warning names the hook and its module."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx.errors import UncapturedGraphWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

KEPT: list[Any] = []


def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
    KEPT.append(output)


class Keeper:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.kept.append(output)

    def method(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept.append(output)


class Layers(nn.Module):
    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


def told(model: nn.Module) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autocastfx.enable(model, dtype="bfloat16")(torch.ones(2, 8, requires_grad=True)).sum().backward()
    return "\n".join(str(one.message) for one in caught if one.category is UncapturedGraphWarning)


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (keep, "keep"),
        (partial(keep), "keep"),
        (Keeper(), "Keeper.__call__"),
        (Keeper().method, "Keeper.method"),
    ],
)
def test_a_forward_hook_under_checkpointing(hook: Callable[..., Any], name: str) -> None:
    model = Layers(is_checkpointed=True)
    model.layers[1].register_forward_hook(hook)
    said = told(model)
    assert re.search(
        rf"Unsafe side effect: the hook {re.escape(name)} at .*test_hooks_named\.py:\d+, on module 'layers\.1', "
        r"changes an object outside of it, .* Remove the hook, or register it on a module around",
        said,
    ), said


def test_a_hook_that_keeps_outputs_is_captured_elsewhere() -> None:
    model = Layers(is_checkpointed=False)
    model.layers[1].register_forward_hook(keep)
    assert not told(model)


def test_backward_hooks() -> None:
    model = Layers(is_checkpointed=False)
    for layer in model.layers:
        layer.register_full_backward_hook(keep)
    assert re.search(
        r"Here the hook keep at .*test_hooks_named\.py:\d+, on module 'layers\.0', module 'layers\.1': remove it to "
        r"have the code captured\)",
        told(model),
    )


class OnTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.fc(x)
            x.register_hook(lambda gradient: KEPT.append(gradient))  # pyright: ignore[reportUnknownLambdaType]
        return x


def test_a_hook_of_a_tensor_is_shown_by_its_line() -> None:
    said = told(OnTensor())
    assert re.search(r"an object that lies outside is changed at .*\.py:\d+: \w+", said), said
