"""Each option of a conversion does the same by ``convert`` and by ``enable``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import OpList, Plan
from autocastfx.errors import UncapturedGraphWarning, UnmatchedRuleWarning, UnsupportedError
from autocastfx.runtime.working_copies import WorkingCopies

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def by_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``convert`` return views."""
    monkeypatch.setattr("autocastfx.conversion._VIEWS", True)


class Layers(nn.Module):
    """Products, a norm, an activation that is written out, and a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = self.second(y * torch.sigmoid(y)) * 1e6
        return self.third(self.norm(y).softmax(-1))


X = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))


def model() -> Layers:
    torch.manual_seed(0)
    return Layers()


def converted(**options: Any) -> tuple[Plan, list[Tensor]]:
    """The plan of ``convert``, and what a step gives."""
    given = model()
    amp_model = autocastfx.convert(given, (X,), **options)
    return amp_model.plan, step(given, amp_model)


def enabled(**options: Any) -> tuple[Plan, list[Tensor]]:
    """The plan of ``enable``, and what a step gives."""
    given = autocastfx.enable(model(), **options)
    found = step(given, given)
    (graph,) = plans_of(given)
    return graph, found


def plans_of(given: nn.Module) -> list[Plan]:
    """The plans of an enabled model."""
    backend = autocastfx.backend_of(given)
    assert backend is not None
    return [graph.plan for graph in backend.graphs if graph.plan is not None]


def step(given: nn.Module, called: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The result and the gradients of a step."""
    y = called(X)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in given.parameters() if p.grad is not None)]


def told(plan: Plan) -> list[Any]:
    """What a plan says of each node, cast, copy and kept value, but for the names of inputs."""
    nodes = [(n.name, n.op, n.module, n.dtype, n.placement.run, n.decision.source, n.error) for n in plan.nodes]
    casts = [(c.dtype, c.readers, c.saturates) for c in plan.casts]
    saved = [(one.name, one.keep) for one in plan.saved]
    return [*nodes, *casts, *saved, len(plan.copies), plan.low, plan.device, [whole.node for whole in plan.recomposed]]


def edited() -> Plan:
    """A plan with an edited line."""
    data = autocastfx.convert(model(), (X,), dtype=LOW).plan.to_json()
    return Plan.from_json(data)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "dtype": lambda: {"dtype": "float16"},
    "op_list": lambda: {"dtype": LOW, "op_list": OpList.of({"deny": ["linear"]})},
    "weights": lambda: {"dtype": LOW, "weights": "cached"},
    "fold": lambda: {"dtype": LOW, "fold": "kernel"},
    "calibrate": lambda: {"dtype": "float16", "calibrate": [X]},
    "headroom": lambda: {"dtype": "float16", "calibrate": [X], "headroom": 1e6},
    "device": lambda: {"dtype": LOW, "device": "cuda"},
    "keep_output_dtype": lambda: {"dtype": LOW, "keep_output_dtype": False},
    "recompose": lambda: {"dtype": LOW, "recompose": False},
    "saved": lambda: {"dtype": LOW, "saved": "recompute"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_the_same_both_ways(name: str) -> None:
    options = OPTIONS[name]()
    (plan, found), (other, alike) = converted(**options), enabled(**options)
    assert told(plan) == told(other)
    if name != "device":
        assert all(torch.equal(a, b) for a, b in zip(found, alike, strict=True))
    without = {key: one for key, one in options.items() if key != name}
    assert told(enabled(**({"dtype": LOW} | without))[0]) != told(other), "the option does nothing here"
