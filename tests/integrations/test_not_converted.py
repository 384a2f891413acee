"""Models of which conversion would make nothing, or harm: those that are enabled, and those in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import StateWarning, UnsupportedError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16


def test_an_enabled_model_is_not_converted() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))), torch.randn(4, 8)
    autocastfx.enable(model, dtype=LOW)
    before = model(x)
    with pytest.raises(UnsupportedError, match="this Sequential is enabled: its calls are converted already"):
        autocastfx.convert(model, (x,), dtype=LOW)
    with pytest.raises(UnsupportedError, match="this Sequential is enabled"):
        autocastfx.convert(model[1], (x,), dtype=LOW)
    with pytest.raises(UnsupportedError, match="the module 0 is enabled"):
        autocastfx.convert(nn.Sequential(model), (x,), dtype=LOW)
    assert torch.equal(model(x), before)
    graphs = autocastfx.backend_of(model)
    assert graphs is not None
    assert not graphs.skipped
    assert autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)(x).shape == before.shape
    assert autocastfx.convert(autocastfx.disable(model), (x,), dtype=LOW)(x).shape == before.shape


def test_a_float64_model_is_warned_of() -> None:
    model, x = nn.Linear(8, 8).double(), torch.randn(4, 8, dtype=torch.float64)
    with pytest.warns(StateWarning, match="the parameters of this Linear are float64") as told:
        autocastfx.convert(model, (x,), dtype=LOW)
    assert told[0].filename == __file__
    with pytest.warns(StateWarning, match="the parameters of this Linear are float64") as told:
        autocastfx.enable(model, dtype=LOW)
    assert told[0].filename == __file__
