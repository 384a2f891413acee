"""Averages of weights: torch's AveragedModel of a converted and of an enabled model, and of a state_dict by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autocastfx

LOW, DECAY, STEPS = torch.bfloat16, 0.75, 4
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


def averaged(model: nn.Module) -> tuple[AveragedModel, dict[str, Tensor]]:
    """Both averages of ``model`` after some steps: torch's, and that of its state by hand."""
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    state: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            if name in state and value.is_floating_point():
                state[name].lerp_(value, 1 - DECAY)
            else:
                state[name] = value.clone()
    return average, state


def of_state(state: dict[str, Tensor]) -> nn.Sequential:
    model = made()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_an_average_of_a_converted_model_computes_as_that_and_shares_nothing(weights: Any) -> None:
    model = made()
    amp_model = autocastfx.convert(model, (X,), dtype=LOW, weights=weights)
    average, state = averaged(amp_model)
    own = dict(model.named_parameters())
    for name, value in average.module.named_parameters():
        assert value.dtype == torch.float32
        assert value.data_ptr() != own[name].data_ptr()
        assert not torch.equal(value, own[name])
        torch.testing.assert_close(value.detach(), state[name], rtol=1e-5, atol=1e-6)
    plain = of_state(dict(average.module.state_dict())).eval()
    expected = autocastfx.convert(copy.deepcopy(plain), (X,), dtype=LOW)
    found = average.eval()(X)
    assert torch.equal(found, expected(X))
    assert not torch.equal(found, plain(X)), "it runs in 16 bits"


def test_an_average_of_an_enabled_model_is_float32_until_it_is_enabled() -> None:
    model = made()
    autocastfx.enable(model, dtype=LOW)
    average, _ = averaged(model)
    plain = of_state(dict(average.module.state_dict())).eval()
    exact = average.eval()(X)
    assert torch.equal(exact, plain(X))
    autocastfx.enable(average.module, dtype=LOW)
    assert torch.equal(average(X), autocastfx.convert(plain, (X,), dtype=LOW)(X))
    assert not torch.equal(average(X), exact)


@pytest.mark.parametrize("is_enabled", [False, True], ids=["convert", "enable"])
@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_an_average_by_hand_is_loaded_to_evaluate_and_taken_back(weights: Any, is_enabled: bool) -> None:
    model = made()
    running: nn.Module = model
    if is_enabled:
        autocastfx.enable(model, dtype=LOW, weights=weights)
    else:
        running = autocastfx.convert(model, (X,), dtype=LOW, weights=weights)
    _, state = averaged(running)
    trained = {name: value.clone() for name, value in running.state_dict().items()}
    before = running.eval()(X)
    running.load_state_dict(state)
    assert torch.equal(running(X), autocastfx.convert(of_state(state).eval(), (X,), dtype=LOW)(X))
    running.load_state_dict(trained)
    assert torch.equal(running(X), before)
