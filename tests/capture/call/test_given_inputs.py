"""The inputs of one call are a tensor, a tuple or a dict, wherever they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.capture.call import CallSignature, batch_of, device_of, inputs_of, named_device

X, Y = torch.ones(2, 4), torch.zeros(2, 4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x) + y


class Reads(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] + batch["y"]


class Takes(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["x"] + inputs["y"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None), ((), {})),
        ((X, None), ((X,), {})),
        ((X, {"y": Y}), ((X,), {"y": Y})),
        (([X, Y], None), ((X, Y), {})),
        (({"x": X}, None), ((), {"x": X})),
        ((None, {"x": X}), ((), {"x": X})),
        ((({"x": X},), None), (({"x": X},), {})),
    ],
)
def test_each_form_gives_positional_and_keyword_inputs(given: Any, expected: Any) -> None:
    assert inputs_of(*given) == expected


@pytest.mark.parametrize("forward", [Two().forward, Takes().forward])
def test_a_dict_alone_holds_keyword_inputs(forward: Callable[..., Any]) -> None:
    signature, batch = CallSignature.of(forward), {"x": X, "y": Y}
    assert batch_of(signature, (batch,), {}) == ((), batch)
    assert batch_of(signature, (X,), {"y": Y}) == ((X,), {"y": Y})


def test_a_dict_whose_keys_are_no_parameters_is_the_first_argument() -> None:
    signature, batch = CallSignature.of(Reads().forward), {"x": X, "y": Y}
    assert batch_of(signature, (batch,), {}) == ((batch,), {})
    assert batch_of(signature, ({},), {}) == (({},), {})


def test_a_batch_is_the_same_for_all_that_take_one() -> None:
    model, batch = Two(), {"x": X, "y": Y}
    amp_model = autocastfx.convert(model, batch, dtype="bfloat16")
    assert autocastfx.compare(model, amp_model, batch).nodes
    assert autocastfx.find_overflow(amp_model, batch) is None
    assert autocastfx.calibrate(model, [batch]).values
    found = autocastfx.bisect(model, batch, lambda one: float(one(**batch).isnan().any()), 0.5, dtype="bfloat16")
    assert found.places == ()


def test_devices() -> None:
    assert device_of(Two().to("meta"), (X,)).type == "meta"
    assert device_of(nn.ReLU(), (), {"batch": [X.to("meta")]}).type == "meta"
    assert device_of(nn.ReLU()).type == "cpu"
    assert named_device(None) is None
    assert named_device("cuda:1") == torch.device("cuda", 1)
