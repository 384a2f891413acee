"""Gradients that jump: what a change before a ReLU or a maximum does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx.graph.node import uses
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.node_effects import Replay, _is_counted, errors_at, jumps, least_error
from autocastfx.numerics.segments import Read
from tests.numerics.node_effects.test_replay import PORTS, captured

PROBES = 64


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 64)])
        self.last, self.act = nn.Linear(64, 4), act

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return self.last(x)


def made(act: Callable[[Tensor], Tensor]) -> Net:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Net(act)


def batch(rows: int = 512) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator)


def loss(output: Any, given: Any) -> Tensor:
    return F.cross_entropy(output, given[1])


def inputs(given: Any) -> Tensor:
    return given[0]


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_": lambda x: F.relu(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardtanh": F.hardtanh,
    "abs": torch.abs,
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 1, 1),
}


def predicted_and_true(act: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    model, given = made(act), batch()
    options: dict[str, Any] = {"dtype": "bfloat16", "probes": PROBES, "inputs": inputs, "progress": False}
    found = autocastfx.sensitivity(model, [given], loss, **options)
    assert not found.unmeasured
    amp_model = autocastfx.convert(model, given[0], dtype="bfloat16", sensitivity=found)
    assert amp_model.plan.error is not None
    return amp_model.plan.error, TargetDistance(model, [given], loss, "gradient", inputs)(amp_model, torch.bfloat16)


@pytest.mark.parametrize("name", ACTS)
def test_a_model_whose_gradients_jump_is_predicted(name: str) -> None:
    """Its error is several times that of a smooth one, and few elements jump, so that it is known roughly."""
    predicted, true = predicted_and_true(ACTS[name])
    smooth, _ = predicted_and_true(torch.tanh)
    assert true > 1.5 * smooth
    assert 0.7 < predicted / true < 1.5


@pytest.mark.parametrize("low", ["layers.0", "layers.2"])
def test_plans_that_round_little_are_predicted(low: str) -> None:
    """Jumps are measured as the default list makes them. Fewer roundings make fewer, but not in proportion."""
    model, given = made(F.relu), batch()
    options: dict[str, Any] = {"dtype": "bfloat16", "probes": PROBES, "inputs": inputs, "progress": False}
    found = autocastfx.sensitivity(model, [given], loss, **options)
    others = ["last", *(f"layers.{i}" for i in range(3) if f"layers.{i}" != low)]
    rules = [{"path": path, "category": "float32"} for path in others]
    lists: Any = ("default", autocastfx.OpList.of({"modules": rules}))
    amp_model = autocastfx.convert(model, given[0], dtype="bfloat16", op_list=lists, sensitivity=found)
    assert amp_model.plan.error is not None
    true = TargetDistance(model, [given], loss, "gradient", inputs)(amp_model, torch.bfloat16)
    assert 0.7 < amp_model.plan.error / true < 1.5


class Deep(nn.Module):
    """Jumps follow on jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(12)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(F.relu(x))
        return self.last(x)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_plan_of_the_list_is_as_measured(low: torch.dtype) -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model, given = Deep(), batch()
    options: dict[str, Any] = {"dtype": low, "inputs": inputs, "progress": False}
    found = autocastfx.sensitivity(model, [given], loss, **options)
    amp_model = autocastfx.convert(model, given[0], dtype=low, sensitivity=found)
    true = TargetDistance(model, [given], loss, "gradient", inputs)(amp_model, low)
    assert found.jumps_true == pytest.approx(true)
    assert amp_model.plan.error == pytest.approx(true, rel=0.1)  # a small part of it is smooth


def test_jumps_count_where_nothing_else_depends_on_the_value() -> None:
    """Behind the first layer all is frozen, and the loss is linear: its gradient changes by jumps alone."""
    model, given = made(F.relu), batch()
    for parameter in (*model.layers[1:].parameters(), *model.last.parameters()):
        parameter.requires_grad_(False)
    options: dict[str, Any] = {"dtype": "bfloat16", "probes": PROBES, "inputs": inputs, "progress": False}
    found = autocastfx.sensitivity(model, [given], lambda output, _: output.sum(), **options)
    amp_model = autocastfx.convert(model, given[0], dtype="bfloat16", sensitivity=found)
    true = TargetDistance(model, [given], lambda output, _: output.sum(), "gradient", inputs)(amp_model, torch.bfloat16)
    assert amp_model.plan.error is not None
    assert 0.7 < amp_model.plan.error / true < 1.5


def test_errors_are_those_of_the_converted_model() -> None:
    model, (x, _) = made(F.relu), batch()
    amp_model = autocastfx.convert(model, x, dtype="bfloat16")
    assert errors_at({"abs"}, amp_model, (x,), {}) == {}
    found = errors_at({"relu"}, amp_model, (x,), {})
    assert list(found) == ["relu", "relu_1", "relu_2"]
    with torch.no_grad():
        exact = model.layers[0](x)
        low = F.linear(*(t.bfloat16() for t in (x, model.layers[0].weight, model.layers[0].bias))).float()
    changed = (low - exact)[exact > 0]
    assert found["relu"] == pytest.approx(float(changed.square().mean().sqrt()), rel=1e-3)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_least_error_is_nearly_that_of_a_rounding(low: torch.dtype) -> None:
    x = F.relu(torch.randn(4096, generator=torch.Generator().manual_seed(0)))
    true = float((x.to(low).float() - x)[x > 0].square().mean().sqrt())
    assert 0.5 * true < least_error(x, low) < true


def test_jumps_count_where_nothing_before_them_is_rounded() -> None:
    model, given = made(F.relu), batch()
    rules = [{"path": path, "category": "float32"} for path in ("*", "re:^$")]
    options: Any = {"dtype": "bfloat16", "probes": PROBES, "inputs": inputs, "progress": False}
    exact = ("default", autocastfx.OpList.of({"modules": rules}))
    found = autocastfx.sensitivity(model, [given], loss, op_list=exact, **options)
    amp_model = autocastfx.convert(model, given[0], dtype="bfloat16", sensitivity=found)
    assert amp_model.plan.error is not None
    smooth, _ = predicted_and_true(torch.tanh)
    assert amp_model.plan.error > 1.5 * smooth


def test_zeros_and_masks_do_not_count() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 20.0, 1e9, 1e9, 3e38, float("inf")])  # more than half of them masks
    assert _is_counted(values).tolist() == [False, True, True, True, False, False, False, False]
    assert not _is_counted(torch.zeros(3)).any()


def test_jumps_are_as_many_as_changes_make() -> None:
    x = torch.linspace(-1, 1, 20_001)
    node = captured(lambda a: a.relu(), x)
    reads, gradient = [Read(node, 0, uses(node)[0])], torch.full_like(x, 3.0)
    error = 1e-2
    found = jumps(Replay(PORTS, torch.bfloat16), node, lambda _: x, reads, [gradient], error)[0].float()
    assert found[x.abs() > 1 / 2].eq(0).all()
    # Of 10,000 elements a unit, a normal change of this standard deviation moves its mean absolute value past zero.
    crossed = 10_000 * error * (2 / torch.pi) ** 0.5
    assert float(found.square().sum()) == pytest.approx(crossed * 9 / error**2, rel=4 / (8 * crossed) ** 0.5)


def test_a_smooth_op_has_no_jumps_measured() -> None:
    model, (x, _) = made(torch.tanh), batch()
    ops = PORTS.facts.switches
    assert errors_at(ops, autocastfx.convert(model, x, dtype="bfloat16"), (x,), {}) == {}
