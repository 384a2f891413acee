"""The metric that is held small by default."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autocastfx import OpList, convert
from autocastfx.errors import BisectError
from autocastfx.numerics.bisect import OutputDistance
from tests.helpers import Function, relative_error


def test_it_is_the_error_of_the_worst_output() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    amp_model = convert(model, (x,), dtype="float16")
    ours, theirs = amp_model(x).detach(), model(x).detach()
    assert OutputDistance(model, (x,), {})(amp_model) == pytest.approx(relative_error(ours, theirs))
    assert OutputDistance(model, (), {"input": x}, "difference")(amp_model) == float((ours - theirs).abs().max())


def test_several_outputs_and_what_is_not_finite() -> None:
    def several(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * 0, {"far": torch.exp(x) * 0, "ids": x.long()}

    x = torch.full((4,), 12.0)
    low = convert(Function(several), (x,), op_list=["default", OpList.of({"allow": ["exp", "mul"]})], dtype="float16")
    assert OutputDistance(Function(several), (x,), {})(low) == math.inf
    assert math.isnan(OutputDistance(Function(several), (x,), {}, "difference")(low))


def test_nothing_is_changed_and_the_same_is_dropped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True))
    x = torch.randn(4, 8)
    amp_model = convert(model, (x,), dtype="float16")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    metric = OutputDistance(model, (x,), {}, seed=3)
    assert metric(amp_model) == metric(amp_model) < 0.01
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_floating_outputs_there_is_none() -> None:
    with pytest.raises(BisectError, match="give a metric of your own"):
        OutputDistance(Function(lambda x: x.argmax()), (torch.ones(3),), {})
