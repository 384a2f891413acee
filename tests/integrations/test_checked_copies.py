"""``check`` of an enabled model, and ``enable(check=)``, on copies: what Dynamo's capture loses is found."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx.errors import CaptureError, UncapturedGraphWarning, UnsupportedError
from autocastfx.integrations.backend import CompileBackend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
X = torch.linspace(-2, 2, 64).reshape(4, 16).sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.calls: list[int] = []

    def body(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls.append(len(self.calls))
        return self.b(self.norm(checkpoint(self.body, x, use_reentrant=False)))


class Choosing(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.a(x)
            if x.sum() > 0:
                x = x * 0.5
        return self.b(x)


def state(model: nn.Module) -> list[Any]:
    tensors = [(one._version, one.detach().clone()) for one in (*model.parameters(), *model.buffers())]
    return [*tensors, torch.get_rng_state(), [m.training for m in model.modules()]]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x[1], y[1]) and x[0] == y[0] for x, y in zip(a[:-2], b[:-2], strict=True)) and (
        torch.equal(a[-2], b[-2]) and a[-1] == b[-1]
    )


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_an_enabled_model_is_checked_and_stays_as_it_is(inner: str) -> None:
    model = autocastfx.enable(Net(), dtype=LOW, inner=inner)
    model(X).sum().backward()
    graphs, runs, before = len(autocastfx.backend_of(model).graphs), len(model.calls), state(model)  # type: ignore[union-attr]
    found = autocastfx.check(model, [X, X * 2])
    assert found.ok, found
    assert (len(found.calls), found.dtype) == (14, "bfloat16")
    assert {value.name for value in found.values} >= {"output", "all gradients", "gradient of a.weight"}
    assert 0 < found.values[0].error < 0.02
    assert same(state(model), before)
    assert len(model.calls) == runs
    model(X)
    assert len(autocastfx.backend_of(model).graphs) <= 2 * graphs  # type: ignore[union-attr]


def test_code_that_dynamo_skips_is_checked_too() -> None:
    model = autocastfx.enable(Choosing(), dtype=LOW)
    found = autocastfx.check(model, [X])
    assert found.ok, found
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward"):
        model(X)


def test_enabling_with_inputs_checks_first() -> None:
    model = Net()
    before = state(model)
    assert autocastfx.enable(model, dtype=LOW, check=X) is model
    assert same(state(model), before)
    assert autocastfx.backend_of(model) is not None
    assert model(X).dtype == torch.float32
    with pytest.raises(CaptureError, match=r"check= could compare no call: .*the model raises"):
        autocastfx.enable(Net(), check=(X, X))


def lose_dropout(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if "dropout" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def lose_a_write(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if "add_" in str(node.target) or str(node.target).endswith("copy_.default"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def scale_an_input(graph: fx.Graph) -> None:
    product = next(node for node in graph.nodes if "linear" in str(node.target))
    with graph.inserting_before(product):
        product.args = (graph.call_function(torch.mul, (product.args[0], 1.001)), *product.args[1:])


@pytest.mark.parametrize(
    ("fault", "found"),
    [(lose_dropout, "output"), (lose_a_write, "buffer norm.num_batches_tracked"), (scale_an_input, "output")],
)
def test_a_fault_of_capture_is_found(fault: Callable[[fx.Graph], None], found: str, monkeypatch: Any) -> None:
    converted = CompileBackend._converted

    def faulty(self: CompileBackend, module: fx.GraphModule, *args: Any) -> fx.GraphModule:
        changed = copy.deepcopy(module)
        for graph in (one for one in changed.modules() if isinstance(one, fx.GraphModule)):
            try:
                fault(graph.graph)
            except StopIteration:
                continue
            graph.recompile()
        return converted(self, changed, *args)

    monkeypatch.setattr(CompileBackend, "_converted", faulty)
    model = Net()
    with pytest.raises(CaptureError, match=rf"captures of Net does not do what the model does: {re.escape(found)}"):
        autocastfx.enable(model, dtype=LOW, check=X)
    assert autocastfx.backend_of(model) is None
    result = autocastfx.check(autocastfx.enable(model, dtype=LOW), [X])
    assert not result.ok
    assert any(found in one.what for one in result.differences)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot copy a lock")

    model = autocastfx.enable(Locked(16, 4), dtype=LOW)
    with pytest.raises(UnsupportedError, match=r"Locked cannot be copied.*a lock"):
        autocastfx.check(model, [X])
    with pytest.raises(UnsupportedError, match="leave the options of a conversion out"):
        autocastfx.check(model, [X], dtype=LOW)
