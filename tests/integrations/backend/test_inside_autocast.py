"""Enabled models whose calls, or whose own code, are inside of regions of torch.autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import CompileBackend
from autocastfx.errors import UncapturedGraphWarning
from tests.helpers import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
X = torch.linspace(-2, 2, 40).reshape(5, 8)


def _enabled(model: nn.Module) -> tuple[nn.Module, CompileBackend]:
    """The copy of a model that is enabled, and its backend."""
    twin = autocastfx.enable(copy.deepcopy(model), dtype=LOW)
    backend = autocastfx.backend_of(twin)
    assert backend is not None
    return twin, backend


@pytest.mark.parametrize("kind", [lambda: nn.Conv1d(5, 5, 1), lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8)])
def test_a_16_bit_input_inside_of_autocast_is_converted_as_another(kind: type[nn.Module]) -> None:
    """torch.autocast casts input and parameters alike; a graph of Dynamo does not say that it does."""
    torch.manual_seed(0)
    model = kind()
    twin, backend = _enabled(model)
    with torch.autocast("cpu", LOW):
        found, wanted = twin(X.to(LOW)), model(X.to(LOW))
    assert [graph.failure for graph in backend.graphs] == [""]
    assert relative_error(found.detach().float(), wanted.detach().float()) < 4 * torch.finfo(LOW).eps


class Writing(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def test_a_16_bit_input_that_forward_writes_to_is_written_to() -> None:
    twin, backend = _enabled(Writing(5, 5, 1))
    given = X.to(LOW)
    with torch.autocast("cpu", LOW), pytest.warns(UncapturedGraphWarning, match="writes into a 16-bit input"):
        twin(given)
    assert torch.equal(given, 2 * X.to(LOW))
    assert backend.graphs[0].plan is None


def test_a_recurrent_layer_with_a_16_bit_input_runs_as_in_autocast() -> None:
    model = nn.LSTM(8, 8)
    twin, _ = _enabled(model)
    with torch.autocast("cpu", LOW), pytest.warns(UncapturedGraphWarning, match=r"under torch\.autocast"):
        found, wanted = twin(X.to(LOW)[None])[0], model(X.to(LOW)[None])[0]
    assert found.dtype == wanted.dtype == LOW
    assert relative_error(found.detach().float(), wanted.detach().float()) < 4 * torch.finfo(LOW).eps


class InRegion(nn.Module):
    def __init__(self, *, is_on: bool) -> None:
        super().__init__()
        self.layer, self.is_on = nn.Linear(8, 8), is_on

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", LOW, enabled=self.is_on):
            return self.layer(x)


def test_a_region_that_forward_opens_is_told_once() -> None:
    """As a trainer's own mixed precision does, around all of forward."""
    model, backend = _enabled(InRegion(is_on=True))
    with pytest.warns(UncapturedGraphWarning, match="what runs in it stays as it is"):
        model(X)
    model(X[:3])  # warnings are errors
    assert len(backend.graphs) == 2
    _enabled(InRegion(is_on=False))[0](X)
