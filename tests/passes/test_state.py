"""A pass either decides or rewrites."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import autocastfx
from autocastfx.passes import pipeline as pipeline_module
from autocastfx.passes.pipeline import PIPELINE
from autocastfx.passes.state import Pass, Settings, State
from tests.test_conversion import Net


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8)


def test_deciding_does_not_touch_the_graph_and_rewriting_does(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = {}

    def spied(step: type[Pass]) -> Callable[[Settings], Callable[[State], State]]:
        def run(policy: Settings, state: State) -> State:
            before = str(state.graph)
            after = step(policy)(state)
            assert after.graph is state.graph
            seen.setdefault(step.name, []).append("changed" if str(after.graph) != before else "same")
            return after

        return lambda policy: partial(run, policy)

    monkeypatch.setattr(pipeline_module, "PIPELINE", tuple(spied(step) for step in PIPELINE))
    autocastfx.convert(Net(), (x,), dtype="float16", check=False)
    expected = {step.name: {"changed" if step.name == "insert casts" else "same"} for step in PIPELINE}
    assert {name: set(found) for name, found in seen.items()} == expected


@pytest.mark.parametrize("options", [{}, {"weights": "cached"}, {"weights": "low"}, {"op_list": "torch_autocast_cpu"}])
def test_a_pass_that_decides_leaves_the_graph_as_it_is(
    options: dict[str, Any], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spied(step: type[Pass]) -> Callable[[Settings], Callable[[State], State]]:
        def run(policy: Settings, state: State) -> State:
            before = str(state.graph)
            after = step(policy)(state)
            assert step.rewrites or str(after.graph) == before, step.name
            return after

        return lambda policy: partial(run, policy)

    for pipeline in ("PIPELINE", "FOLLOW_PIPELINE"):
        steps = getattr(pipeline_module, pipeline)
        assert [step.name for step in steps if not step.rewrites] in (["classify", "place"], ["classify", "follow"])
        monkeypatch.setattr(pipeline_module, pipeline, tuple(spied(step) for step in steps))
    model = Net().eval()
    autocastfx.convert(model, (x,), dtype=torch.bfloat16, **options)
