"""The backend of an enabled model as the last value of a notebook's cell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autocastfx
from autocastfx.errors import UncapturedGraphWarning
from tests.graph.test_cell import EVIL, shown


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        torch._dynamo.graph_break()
        return x.relu()


def as_it_is(module: fx.GraphModule, _: Any) -> Any:
    return module.forward


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_backend_of_an_enabled_model() -> None:
    model = autocastfx.enable(Broken(), dtype="bfloat16")
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert repr(backend) == "CompileBackend(bfloat16, op list bfloat16, then eager; 0 graphs; run 0 times)"
    assert "<table>" not in backend._repr_html_()
    model(torch.ones(2, 8))
    assert repr(backend).endswith("; 2 graphs, 1 node low, 1 node float32; run 2 times)")
    assert "1 low" in shown(backend)
    broken = autocastfx.CompileBackend(dtype="bfloat16", inner=as_it_is)
    with pytest.warns(UncapturedGraphWarning, match="cannot be converted"):
        broken._compile_unconverted(fx.symbolic_trace(nn.ReLU()), [], torch.device("cpu"), ValueError(EVIL))
    assert "1 graph; 1 not converted; run 0 times" in repr(broken)
    assert f"ValueError: {EVIL}" in shown(broken)
