"""Magnitudes of gradients in training: complete, unscaled, and seen without touching them."""

from __future__ import annotations

import builtins
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx import DynamicLossScale, LossScalingOptimizer, NoLossScale, StaticLossScale, convert, gradient_histogram
from autocastfx.errors import CalibrationError, MissingExtraError
from autocastfx.graph.magnitude import NOTHING, Exponents, Margin, Tally, read_tallies
from autocastfx.numerics.gradient_histogram import GradientHistogram

LOW = torch.bfloat16


class Net(nn.Module):
    """Values that are views, a residual connection, a module that gives a tuple, and one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.act, self.flat, self.drop = nn.ReLU(), nn.Flatten(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        y = y + self.drop(self.norm(y))
        return self.last(self.flat(y))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)


def model(is_converted: bool, dtype: torch.dtype = LOW) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    return convert(net, (batch()[0],), dtype=dtype) if is_converted else net


def train(module: nn.Module, optimizer: LossScalingOptimizer, steps: int = 3) -> list[Tensor]:
    """Losses and, at the end, gradients and weights."""
    torch.manual_seed(2)
    x, target = batch()
    seen: list[Tensor] = []
    for _ in range(steps):
        loss = F.cross_entropy(module(x).float(), target)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        seen.append(loss.detach())
    return [
        *seen,
        *(p.grad for p in module.parameters() if p.grad is not None),
        *(p.detach() for p in module.parameters()),
    ]


def wrapped(module: nn.Module, scale: Any = None) -> LossScalingOptimizer:
    return LossScalingOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), scale or NoLossScale())


def counted(*tensors: Tensor) -> Exponents:
    tally = Tally(torch.device("cpu"))
    for tensor in tensors:
        tally.add(tensor)
    return read_tallies([tally])[0]


@pytest.mark.parametrize("is_converted", [False, True])
def test_every_parameter_is_recorded_and_nothing_changes_to_the_bit(is_converted: bool) -> None:
    plain, seen = model(is_converted), model(is_converted)
    expected = train(plain, wrapped(plain))
    with gradient_histogram(seen) as histogram:
        found = train(seen, wrapped(seen))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {n: e.total + e.zeros for n, e in histogram.parameters.items()} == {
        n: 3 * p.numel() for n, p in seen.named_parameters()
    }
    assert histogram.activations.total > 0


def test_weight_gradients_are_those_of_each_step() -> None:
    net = model(False)
    optimizer = wrapped(net)
    gradients: list[Tensor] = []
    with gradient_histogram(net) as histogram:
        for _ in range(3):
            train(net, optimizer, 1)
            gradients += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    assert histogram.weights == counted(*gradients)
    assert histogram.largest == max(histogram.activations.largest, *(float(g.abs().max()) for g in gradients))
    assert histogram.suggested_loss_scale() == autocastfx.suggest_loss_scale(histogram.largest)
    assert histogram.suggested_loss_scale(margin=4) == histogram.suggested_loss_scale() / 4


def test_of_a_module_the_outputs_of_its_modules_are_recorded_once() -> None:
    net = model(False).eval()
    with gradient_histogram(net) as histogram:
        train(net, wrapped(net), 1)
    # flat gives a view, drop its input, and the whole what last gives: these gradients are recorded already.
    assert {n: e.total + e.zeros for n, e in histogram.values.items()} == {
        "first": 128, "act": 128, "norm": 128, "last": 48,
    }  # fmt: skip


def test_of_a_graph_every_computed_value_is_recorded() -> None:
    amp_model = model(True)
    assert isinstance(amp_model, autocastfx.AmpModule)
    with gradient_histogram(amp_model) as histogram:
        train(amp_model, wrapped(amp_model), 1)
    assert set(histogram.values) == {"linear", "relu", "layer_norm", "dropout", "add", "linear_1"}
    assert histogram.values["add"].total + histogram.values["add"].zeros == 128
    assert any("to" in str(n.target) for n in amp_model.graph.nodes), "casts there are, and none is counted"


def test_activation_gradients_are_what_autograd_gives() -> None:
    net = model(False).eval()
    x, target = batch()
    hidden = F.relu(net.first(x))  # type: ignore[union-attr]
    grads = torch.autograd.grad(
        F.cross_entropy(net.last(hidden + net.norm(hidden)), target),
        [hidden],  # type: ignore[union-attr]
    )
    with gradient_histogram(net) as histogram:
        train(net, wrapped(net), 1)
    assert histogram.values["act"] == counted(*grads)


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("given", ["optimizer", "number", "function"])
def test_the_scale_is_divided_out(is_converted: bool, given: str) -> None:
    plain, scaled = model(is_converted), model(is_converted)
    with gradient_histogram(plain) as expected:
        train(plain, wrapped(plain))
    optimizer = wrapped(scaled, StaticLossScale(2.0**12))
    scales: dict[str, Any] = {"optimizer": optimizer, "number": 2.0**12, "function": lambda: 2.0**12}
    with gradient_histogram(scaled, scale=scales[given]) as found:
        train(scaled, optimizer)
    assert found.values == expected.values  # float32 and bfloat16 lose nothing by a power of two
    assert found.parameters == expected.parameters


def test_a_scale_that_moves_is_followed() -> None:
    plain, scaled = model(False), model(False)
    with gradient_histogram(plain) as expected:
        train(plain, wrapped(plain), 4)
    optimizer = wrapped(scaled, DynamicLossScale(init=4.0, interval=1))
    with gradient_histogram(scaled, scale=optimizer) as found:
        train(scaled, optimizer, 4)
    assert optimizer.loss_scaler.value == 64
    assert found.weights == expected.weights


def test_overflows_are_counted_apart() -> None:
    amp_model = model(True, torch.float16)
    optimizer = wrapped(amp_model, DynamicLossScale(init=2.0**24))
    with gradient_histogram(amp_model, scale=optimizer) as histogram:
        train(amp_model, optimizer, 1)
    assert optimizer.last_step.skipped
    assert histogram.weights.non_finite > 0
    assert math.isfinite(histogram.largest)


def test_a_16_bit_model_with_masters() -> None:
    net = model(False).half()
    optimizer = wrapped(net, StaticLossScale(2.0**8))
    x, target = batch()
    with gradient_histogram(net, scale=optimizer) as histogram:
        optimizer.backward(F.cross_entropy(net(x.half()).float(), target))
        gradients = [p.grad.float() / 2**8 for p in net.parameters() if p.grad is not None]
        optimizer.step()
    assert len(gradients) == 6
    assert histogram.weights == counted(*gradients)


def hooks_of(module: nn.Module) -> int:
    on_tensors = sum(len(p._backward_hooks or ()) for p in module.parameters())
    return on_tensors + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_stays(is_converted: bool, fails: bool) -> None:
    module = model(is_converted)
    before = [v.function for v in module.variants] if isinstance(module, autocastfx.AmpModule) else []
    pending: Callable[[], None] = lambda: None  # noqa: E731
    histogram = GradientHistogram()
    try:
        with gradient_histogram(module) as histogram:
            train(module, wrapped(module), 1)
            assert hooks_of(module) > 0
            loss = module(batch()[0]).sum()
            pending = loss.backward
            if fails:
                raise KeyError("stop")
    except KeyError:
        assert fails
    assert hooks_of(module) == 0
    if isinstance(module, autocastfx.AmpModule):
        assert [v.function for v in module.variants] == before
    recorded = histogram.to_json()
    pending()
    assert histogram.to_json() == recorded, "a backward pass after the block is not recorded"


def test_a_variant_that_is_captured_inside_is_recorded_at_once() -> None:
    amp_model = convert(Net(), dtype=LOW)  # its first call captures
    with gradient_histogram(amp_model) as histogram:
        train(amp_model, wrapped(amp_model), 1)
    assert "linear_1" in histogram.values
    sizes = {name: p.numel() for name, p in amp_model.named_parameters()}
    assert {name: e.total + e.zeros for name, e in histogram.parameters.items()} == sizes


def test_a_part_that_is_converted_is_seen_as_a_graph() -> None:
    inner = model(True)
    whole = nn.Sequential(inner, nn.Linear(3, 2))
    with gradient_histogram(whole) as histogram:
        whole(batch()[0]).sum().backward()
    assert {"0.linear", "0.add", "1"} <= set(histogram.values)


def test_sparse_and_unused_parameters() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    net = nn.ModuleDict({"used": embedding, "unused": nn.Linear(2, 2)})
    with gradient_histogram(net) as histogram:
        embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert histogram.parameters == {"used.weight": Exponents({0: 4, 1: 4}, 0, 0, 2.0)}
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse


def test_memory_does_not_grow() -> None:
    net = model(False)
    optimizer = wrapped(net)
    with gradient_histogram(net) as histogram:
        train(net, optimizer, 1)
        before = len(histogram._tallies)
        train(net, optimizer, 5)
    assert len(histogram._tallies) == before


def test_nothing_recorded() -> None:
    net = model(False)
    with gradient_histogram(net) as histogram:
        pass
    for ask in (lambda: histogram.largest, histogram.suggested_loss_scale, histogram.table, histogram.margin):
        with pytest.raises(CalibrationError, match="no gradient other than zero was recorded: run backward passes"):
            ask()
    assert histogram.activations == NOTHING
    with (
        pytest.raises(CalibrationError, match="Net has no parameter that asks for a gradient: unfreeze"),
        gradient_histogram(net.requires_grad_(False)),
    ):
        pass


@pytest.fixture
def histogram() -> GradientHistogram:
    net = nn.Linear(4, 1)
    with gradient_histogram(net) as found:
        (net(torch.tensor([[1.0, 2.0, 4.0, 8.0]])) * 2.0**-26).sum().backward()
    return found


def test_the_table(histogram: GradientHistogram) -> None:
    # Weights: 2**-26 to 2**-23, and the bias 2**-26; the activation 2**-26.
    lines = histogram.table(2.0**14).splitlines()
    assert lines[0].split() == ["gradients", "in", "float16", "unscaled", "times", "2**14"]
    assert lines[1] == "activation gradients: 1, largest 1.49e-08; besides 0 zero, 0 not finite"
    assert lines[2].split() == ["becomes", "zero", "100.0", "%", "0.0", "%"]
    assert lines[6] == "  powers of two left, from 2**-26 to 2**-26; below 0: beyond the limit"
    assert [line.split() for line in lines[7:10]] == [
        ["to", "infinite", "41", "27"],
        ["to", "denormal", "-12", "2"],
        ["to", "zero", "-1", "13"],
    ]
    assert lines[10].startswith("weight gradients: 5, largest 1.19e-07;")
    assert lines[11].split() == ["becomes", "zero", "40.0", "%", "0.0", "%"]
    assert lines[12].split() == ["denormal", "60.0", "%", "0.0", "%"]
    assert lines[13].split() == ["normal", "0.0", "%", "100.0", "%"]
    assert lines[15] == "  powers of two left, from 2**-26 to 2**-23; below 0: beyond the limit"
    assert lines[16].split() == ["to", "infinite", "38", "24"]
    assert "2**-26       100.0 %      40.0 %  " + "#" * 40 in lines
    assert lines[-1].split() == ["Linear", "100.0", "%", "0.0", "%"]
    assert f"times 2**{int(math.log2(histogram.suggested_loss_scale()))}" in histogram.table()


def test_the_margin_is_of_all_gradients_and_names_the_scale(histogram: GradientHistogram) -> None:
    assert histogram.margin(2.0**10) == Margin(2.0**10, -23, -26, 28, -2, 9)
    assert str(histogram.margin(2.0**10)) == (
        "times 2**10: the largest, from 2**-23, are 28 powers of two away from infinity; the smallest, from 2**-26, "
        "are 2 powers of two into denormals and 9 powers of two away from zero"
    )
    suggested = histogram.margin()
    assert suggested.loss_scale == histogram.suggested_loss_scale()
    assert suggested.to_infinite >= 0


def test_json(histogram: GradientHistogram) -> None:
    data = json.loads(histogram.to_json())
    assert data["weights"] == {
        "counts": {"-26": 2, "-25": 1, "-24": 1, "-23": 1}, "zeros": 0, "non_finite": 0, "largest": 2.0**-23,
    }  # fmt: skip
    assert set(data["parameters"]) == {"weight", "bias"}
    assert set(data["values"]) == {"Linear"}
    assert data["activations"]["counts"] == {"-26": 1}


def test_the_picture(histogram: GradientHistogram, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    histogram.plot(tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
    histogram.plot(tmp_path / "gradients.svg", loss_scale=2.0**10)
    drawn = (tmp_path / "gradients.svg").read_text(encoding="utf-8")
    for said in ("Without a loss scale", "Activation gradients", "becomes zero", "40.0 %"):
        assert f"<!-- {said}" in drawn, said
    with pytest.raises(ValueError, match="a power of two here"):
        histogram.plot(tmp_path / "never.png", loss_scale=1000)


def test_without_matplotlib(histogram: GradientHistogram, monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'autocastfx\[plot\]', or use table\(\)"):
        histogram.plot("never.png")


def test_a_copy_made_inside_is_a_model_of_its_own() -> None:
    amp_model = model(True)
    with gradient_histogram(amp_model):
        amp_model(batch()[0])
        copied = copy.deepcopy(amp_model)
    assert torch.equal(copied.eval()(batch()[0]), amp_model.eval()(batch()[0]))
