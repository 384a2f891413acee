"""Models of which conversion would make nothing, or harm: those that are enabled, and those in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import autocastfx
from autocastfx.errors import CaptureError, StateWarning, UncapturedGraphWarning, UnsupportedError

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


def total(output: torch.Tensor, _: object = None) -> torch.Tensor:
    return output.sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
def test_torchscript_is_refused_wherever_it_is() -> None:
    x = torch.randn(4, 8)
    scripted, traced = torch.jit.script(nn.Linear(8, 8)), torch.jit.trace(nn.Linear(8, 8), (x,))
    tools: tuple[Any, ...] = (
        autocastfx.convert,
        autocastfx.enable,
        lambda model, dtype: autocastfx.tune(model, [(x,)] * 2, total, dtype=dtype),
        lambda model, dtype: autocastfx.sensitivity(model, [(x,)], total, dtype=dtype),
        lambda model, dtype: autocastfx.check(model, [(x,)], dtype=dtype),
        lambda model, dtype: autocastfx.bisect(model, x, total, 0.1, dtype=dtype),
        lambda model, dtype: autocastfx.calibrate(model, [(x,)]),
        lambda model, dtype: autocastfx.logprob_gap(model, model, [(x,)]),
    )
    for script in (scripted, traced):
        for convert in tools:
            with pytest.raises(UnsupportedError, match=r"this model is a \w+ of torch\.jit, which has no Python code"):
                convert(script, dtype=LOW)
            with pytest.raises(
                UnsupportedError, match=r"the module '1' is a \w+ of torch\.jit, .* that it was made from"
            ):
                convert(nn.Sequential(nn.Linear(8, 8), script), dtype=LOW)


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
def test_torch_jit_script_is_refused_with_what_to_do() -> None:
    """It compiles Python code alone: without a word an enabled model would be scripted in float32."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    amp_model = autocastfx.convert(model, x, dtype=LOW)
    low, frozen = autocastfx.convert(model, x, dtype=LOW, weights="low"), amp_model.freeze(x)
    for one in (amp_model, low, frozen, nn.Sequential(amp_model)):
        with pytest.raises(
            UnsupportedError, match=r"^torch\.jit\.script compiles .* use torch\.jit\.trace\(amp_model\.fr"
        ):
            torch.jit.script(one)
    autocastfx.enable(model, dtype=LOW)
    for one, named in (
        (model, "this Sequential"),
        (model[0], "this Linear"),
        (nn.ModuleDict({"a": model}), "the .*'a'"),
    ):
        with pytest.raises(
            UnsupportedError, match=f"^{named} is enabled, and torch.jit.script compiles .*copy.deepcopy"
        ):
            torch.jit.script(one)
    scripted = torch.jit.script(autocastfx.disable(model))
    assert torch.equal(scripted(x), model(x))
    assert torch.jit.script(nn.Linear(8, 8))(x).shape == (4, 8)


@pytest.mark.parametrize("uncaptured", ["autocast", "error"])
def test_a_trace_by_torch_fx_of_an_enabled_model_is_told(uncaptured: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    exact = model(x)
    autocastfx.enable(model, dtype=LOW, uncaptured=uncaptured)
    told = "torch.compile is off, by a trace by torch.fx around the call: Sequential runs"
    if uncaptured == "error":
        with pytest.raises(CaptureError, match=told):
            make_fx(lambda x: model(x))(x)
        return
    with pytest.warns(UncapturedGraphWarning, match=f"{told} under torch.autocast, in bfloat16"):
        traced = make_fx(lambda x: model(x))(x)
    assert "bfloat16" in traced.code
    torch.testing.assert_close(traced(x), exact, atol=0.05, rtol=0.05)


def test_parameters_of_fsdp1_are_refused_with_the_way_to_take() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight._fsdp_flattened = True  # as FullyShardedDataParallel marks them
    with pytest.raises(UnsupportedError, match=r"'0\.weight' .* is held by FullySha.* Convert the model first"):
        autocastfx.convert(model, (torch.randn(4, 8),), dtype=LOW)


def test_a_float64_model_is_warned_of() -> None:
    model, x = nn.Linear(8, 8).double(), torch.randn(4, 8, dtype=torch.float64)
    with pytest.warns(StateWarning, match="the parameters of this Linear are float64") as told:
        autocastfx.convert(model, (x,), dtype=LOW)
    assert told[0].filename == __file__
    with pytest.warns(StateWarning, match="the parameters of this Linear are float64") as told:
        autocastfx.enable(model, dtype=LOW)
    assert told[0].filename == __file__


class Parts(nn.Module):
    """Float64 in ``wide`` parts of a float32 model."""

    def __init__(self, wide: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64 if wide == "buffer" else torch.float32))
        if wide == "layer":
            self.last.double()
        elif wide == "many":
            self.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).to(self.last.weight.dtype)) * self.scale


@pytest.mark.parametrize(
    ("wide", "words"),
    [
        ("buffer", "scale in this Parts are float64"),
        ("layer", "last.weight, last.bias in this Parts are float64"),
        ("many", "more.0.weight, more.0.bias, more.1.weight, more.1.bias and 2 more in this Parts are float64"),
    ],
)
def test_float64_parts_of_a_float32_model_are_named(wide: str, words: str) -> None:
    model, x = Parts(wide), torch.randn(4, 8)
    for convert in (lambda: autocastfx.convert(model, (x,), dtype=LOW, check=False), lambda: autocastfx.enable(model)):
        with pytest.warns(StateWarning, match=f"^{words}, and only float32 values are converted") as told:
            convert()
        assert [one.filename for one in told] == [__file__]


def test_a_float32_model_is_not_warned_of() -> None:
    autocastfx.convert(Parts(""), (torch.randn(4, 8),), dtype=LOW, check=False)
