"""Each option of a conversion does the same by ``convert`` and by ``enable``."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx import OpList, Plan, Sensitivity
from autocastfx.errors import UnmatchedPlanWarning, UnmatchedRuleWarning, UnsupportedError
from autocastfx.options import Options
from autocastfx.plan.plan import Precision

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16


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


def edited(tmp_path: Path) -> Path:
    """The file of a plan whose last product was moved to float32."""
    given = json.loads(converted(dtype=LOW)[0].to_json())
    for node in given["nodes"]:
        if node["name"] == "linear_2":
            node["placement"] |= {"run": "float32", "store": "float32"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(given))
    return path


@cache
def measured() -> Sensitivity:
    """What 16 bits cost each node of the model."""
    return autocastfx.sensitivity(model(), [(X,)], lambda y, _: y.square().sum(), dtype=LOW, probes=1)


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dtype": lambda _: {"dtype": "float16"},
    "op_list": lambda _: {"dtype": LOW, "op_list": OpList.of({"deny": ["linear"]})},
    "weights": lambda _: {"dtype": LOW, "weights": "cached"},
    "fold": lambda _: {"dtype": LOW, "fold": "kernel"},
    "calibrate": lambda _: {"dtype": "float16", "calibrate": [X]},
    "headroom": lambda _: {"dtype": "float16", "calibrate": [X], "headroom": 1e6},
    "device": lambda _: {"dtype": LOW, "device": "cuda"},
    "keep_output_dtype": lambda _: {"dtype": LOW, "keep_output_dtype": False},
    "plan": lambda path: {"dtype": LOW, "plan": edited(path)},
    "recompose": lambda _: {"dtype": LOW, "recompose": False},
    "sensitivity": lambda _: {"dtype": LOW, "sensitivity": measured()},
    "saved": lambda _: {"dtype": LOW, "saved": "recompute"},
}


def test_all_options_are_tried() -> None:
    """``fuse`` changes no plan: tests/runtime/test_regions.py tries it both ways."""
    assert {*OPTIONS, "fuse"} == {one.name for one in dataclasses.fields(Options)}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_the_same_both_ways(name: str, tmp_path: Path) -> None:
    """An option that one of the ways ignores fails here: each does something to this model."""
    options = OPTIONS[name](tmp_path)
    (plan, found), (other, alike) = converted(**options), enabled(**options)
    assert told(plan) == told(other)
    if name != "device":  # whose kernels are not at hand
        assert all(torch.equal(a, b) for a, b in zip(found, alike, strict=True))
    without = {key: one for key, one in options.items() if key != name}
    assert told(enabled(**({"dtype": LOW} | without))[0]) != told(other)


def test_a_block_that_runs_again_in_backward_is_part_of_the_plan_both_ways() -> None:
    class Checkpointed(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x * 1.0, use_reentrant=False)

    torch.manual_seed(0)
    given = Checkpointed()
    amp_model = autocastfx.convert(given, (X,), dtype=LOW)
    plan, wanted = amp_model.plan, converted(dtype=LOW)[1]
    ran = autocastfx.enable(copy.deepcopy(given), dtype=LOW)
    step(ran, ran)
    (alike,) = plans_of(ran)
    assert told(plan) == told(alike)
    low = {n.name.rpartition("/")[2] for n in plan.nodes if n.placement.run is Precision.LOW}
    assert {"linear", "linear_1", "linear_2"} <= low
    assert all(torch.equal(a, b) for a, b in zip(step(given, amp_model), wanted, strict=True))


class Broken(Layers):
    """A model whose graph breaks in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x)) * 1e6
        torch._dynamo.graph_break()
        return self.third(y)


def test_ranges_are_measured_where_the_graph_breaks_too() -> None:
    torch.manual_seed(0)
    given = Broken()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    autocastfx.enable(given, dtype="float16", calibrate=[X, X[:3]])
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert given(X).isfinite().all()
    forced = [n.name for plan in plans_of(given) for n in plan.nodes if n.decision.source == "forced:range"]
    assert len(forced) >= 2, "in both graphs"


def test_copies_follow_the_weights_of_an_enabled_model() -> None:
    given, other = autocastfx.enable(model(), dtype=LOW, weights="cached"), autocastfx.enable(model(), dtype=LOW)
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (given, other))
    for _ in range(3):
        for one, optimizer in ((given, ours), (other, theirs)):
            optimizer.zero_grad()
            step(one, one)
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(given.parameters(), other.parameters(), strict=True))
    backend = autocastfx.backend_of(given)
    assert backend is not None
    given.get_parameter("first.weight").data.zero_()
    backend.refresh_weights()
    other.get_parameter("first.weight").data.zero_()
    assert torch.equal(given(X), other(X))


def test_copies_of_another_kind_are_refused_or_told() -> None:
    with pytest.raises(UnsupportedError, match='weights="low" makes a model of its own'):
        autocastfx.enable(model(), dtype=LOW, weights="low")
    with pytest.warns(UnmatchedRuleWarning, match='weights="cached" has no effect'):
        autocastfx.enable(model(), dtype=LOW, weights="cached", inner="aot_eager")
    with pytest.warns(UnmatchedRuleWarning, match="rules under 'saved'"):
        autocastfx.enable(model(), dtype=LOW, saved="recompute", inner="aot_eager")
    with pytest.warns(UnmatchedRuleWarning, match="of no model that the backend has compiled"):
        torch.compile(model(), backend=autocastfx.CompileBackend(dtype=LOW, weights="cached", inner="eager"))(X)
    with pytest.raises(UnsupportedError, match=r"enable\(model, calibrate=batches\) measures them"):
        autocastfx.CompileBackend(dtype=LOW, calibrate=[X])


def test_what_matches_nothing_is_told_of_enabled_models(tmp_path: Path) -> None:
    path = edited(tmp_path)
    path.write_text(path.read_text().replace('"linear_2"', '"linear_9"'))
    with pytest.warns(UnmatchedPlanWarning, match="linear_9"):
        enabled(dtype=LOW, plan=path)
