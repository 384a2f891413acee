"""The operator ``quantize`` takes its Triton kernels where a variable asks for them, and layers give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autocastfx.policy.float8 import E4M3, RECIPES, Layout
from autocastfx.runtime.kernels.chosen import names_chosen
from autocastfx.runtime.operators import float8
from autocastfx.runtime.operators.float8 import float8_linear, quantize
from benchmarks.gpu.stages.float8_products import LAYOUTS, operator
from benchmarks.gpu.stages.float8_products import kernels as timed_kernels
from tests.runtime.kernels.against_float64 import drawn
from tests.runtime.kernels.quantized import torch_casts

pytestmark = pytest.mark.usefixtures("interpreter", "chosen")
LOW = torch.bfloat16


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variable chooses for tensors on the CPU, too."""
    monkeypatch.setenv("AUTOCASTFX_TRITON", "quantize")
    monkeypatch.setattr(float8, "is_chosen", lambda name, tensor: name in names_chosen())
    names_chosen.cache_clear()
    with torch_casts():
        yield
    names_chosen.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of kernels."""
    from autocastfx.runtime.kernels import quantize as kernels

    called: list[str] = []

    def watch(name: str) -> None:
        own: Callable[..., Any] = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given: (called.append(name), own(*given))[1])

    for name in ("quantize_rows", "quantize_columns", "quantize_both"):
        watch(name)
    return called


def test_eager_values_are_quantised_by_kernels(calls: list[str]) -> None:
    x = drawn(2, 8, 48).to(LOW).requires_grad_()
    for layout in (Layout.ROWS, Layout.COLUMNS):
        found = quantize(x, layout, E4M3, True)
        assert all(a.equal(b) for a, b in zip(found, float8._parts(x.detach(), layout, E4M3, True), strict=True))
        assert not found[0].requires_grad
    assert calls == ["quantize_rows", "quantize_columns"]


@pytest.mark.parametrize("x", [drawn(4, 16).double(), torch.empty(0, 16)], ids=["float64", "empty"])
def test_what_kernels_do_not_take_is_left_to_the_parts(x: Tensor, calls: list[str]) -> None:
    for layout in (Layout.ROWS, Layout.COLUMNS):
        assert quantize(x, layout, E4M3, True)[0].numel() == x.numel()
    quantize(drawn(4, 16), Layout.TENSOR, E4M3, False)
    assert calls == []


def test_without_float8_tensor_cores_there_are_no_kernels(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "missing_products", lambda device: "none")
    quantize(drawn(4, 16), Layout.ROWS, E4M3, True)
    assert calls == []


def test_a_compiler_and_transforms_see_the_parts(calls: list[str]) -> None:
    x = drawn(4, 16).to(LOW)
    wanted = float8._parts(x, Layout.ROWS, E4M3, True)[1]
    with FakeTensorMode() as mode:
        quantize(mode.from_tensor(x), Layout.ROWS, E4M3, True)
    # The operator on a CPU is one for tracing, and torch takes batches apart before they come to it.
    make_fx(lambda x: float8._quantized(x, Layout.ROWS, E4M3, True))(x)
    assert torch.func.vmap(lambda row: float8._quantized(row, "rows", E4M3, True)[1])(x).view(4, 1).equal(wanted)
    assert calls == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_gives_the_same_and_quantises_its_gradient_in_one_go(
    recipe: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    products = " ".join(RECIPES[recipe].layouts)

    def layer(*, weighs: bool = True) -> list[Tensor]:
        x, weight = drawn(32, 48).to(LOW).requires_grad_(), drawn(16, 48).to(LOW).requires_grad_(weighs)
        result: Tensor = float8_linear(x, weight, None, [], [], [], [], recipe, products)
        asked = (x, weight) if weighs else (x,)
        return [result, *torch.autograd.grad(result, asked, drawn(32, 16).to(LOW))]

    found = layer()
    assert calls.count("quantize_both") == (recipe == "rowwise")
    calls.clear()
    assert layer(weighs=False)[1].equal(found[1])
    assert "quantize_both" not in calls
    calls.clear()
    monkeypatch.setattr(float8, "is_chosen", lambda name, tensor: False)
    assert all(a.equal(b) for a, b in zip(found, layer(), strict=True))
    assert calls == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_benchmark_times_the_kernels_beside_the_same_of_the_parts(name: str, calls: list[str]) -> None:
    x, timed = drawn(20, 12).to(LOW), timed_kernels(name, "cuda")
    assert not isinstance(timed, str)
    assert all(a.equal(b) for a, b in zip(timed(x), operator(LAYOUTS[name])(x), strict=True))
    assert calls == [f"quantize_{name}"]
