"""What the float8 stage of ``benchmarks.gpu`` measures computes what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autocastfx.runtime.operators.float8 import quantize
from benchmarks.gpu.stage import Given, Rounds
from benchmarks.gpu.stages import float8_products
from benchmarks.gpu.stages.float8_products import (
    COPY,
    E4M3,
    E5M2,
    LAYOUTS,
    both_layouts,
    operator,
    products,
    quantised,
    rowwise,
)
from benchmarks.judge import distance
from tests.helpers import TORCH

FEW = Rounds(2, 2, 0, 1)
# Half a unit in the last place: relative to normal numbers, and between subnormal ones.
HALF = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}


def _random(*size: int) -> Tensor:
    """Rows and columns of very different magnitudes."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=random) * 10 ** torch.randn(size[0], 1, generator=random)
    return (x * 10 ** torch.randn(size[1], generator=random)).bfloat16()


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("dtype", HALF)
def test_what_is_quantised_is_the_nearest_number(dtype: torch.dtype, dim: int | None) -> None:
    x = _random(48, 80)
    low, factor = quantised(x, dtype, dim)
    assert low.dtype == dtype
    assert factor.dtype == torch.float32
    given, factor = x.double(), factor.double()
    relative, between = HALF[dtype]
    bound = torch.maximum(relative * given.abs(), between * factor)
    assert ((low.double() * factor - given).abs() <= bound * (1 + 1e-6)).all()
    largest = low.float().abs().amax() if dim is None else low.float().abs().amax(dim)
    assert (largest == torch.finfo(dtype).max).all()


def test_the_layouts_are_transposes_each_with_scales_of_its_rows() -> None:
    x = _random(48, 80)
    rows, factor, columns, other = both_layouts(x)
    assert all(a.equal(b) for a, b in zip(_codes(rows, factor), _codes(*rowwise(x)), strict=True))
    assert all(a.equal(b) for a, b in zip(_codes(columns, other), _codes(*rowwise(x.t().contiguous())), strict=True))
    assert rows.is_contiguous()
    assert columns.is_contiguous()
    assert (factor.shape, other.shape) == ((48, 1), (80, 1))


def _codes(low: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return low.view(torch.uint8), factor


def test_zeros_stay_zeros_and_what_is_not_finite_stays_visible() -> None:
    x = _random(4, 32)
    x[0] = 0
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    low, factor = rowwise(x)
    back = low.float() * factor
    assert (back[0] == 0).all()
    assert back[1:3].isnan().all()
    assert back[3].isfinite().all()
    zeros, factor = quantised(torch.zeros(4, 4).bfloat16())
    assert (zeros.float() * factor == 0).all()
    assert not (low.float() * quantised(x)[1]).isfinite().any(), "one scale for all"


def test_a_scaled_product_is_that_of_the_dequantised_operands() -> None:
    a, b = _random(32, 64), _random(48, 64)
    for side, dtype in (("tensorwise", E4M3), ("rowwise", E4M3), ("rowwise, e5m2 gradient", E5M2)):
        dim = None if side == "tensorwise" else 1
        dequantised = [low.double() * factor for low, factor in (quantised(a, dtype, dim), quantised(b, E4M3, dim))]
        if dim is None or TORCH >= (2, 13):  # torch 2.11 has no scales of rows on a CPU
            found = float8_products._calls(a, b)[side]()
            assert found.dtype == torch.bfloat16
            assert distance(found, dequantised[0] @ dequantised[1].t()) < torch.finfo(torch.bfloat16).eps / 2


def test_each_side_is_a_row_and_one_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*operands: object, **options: object) -> Callable[[], Tensor]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    found = {(row["model"], row.get("side", "")): row for row in products(Given("cpu"), [(32, 64, 16)], FEW, 0)}
    assert found["32 x 64 x 16", "bfloat16"]["to_bfloat16"] == [1, 1, 1]
    assert found["32 x 64 x 16", "rowwise"]["error"] == "RuntimeError: no such kernel"
    assert found["linear 32 x 64 x 16", ""]["bfloat16"] < 2**-8
    assert found["quantise 32 x 64", COPY]["gb_per_second"] > 0
    assert len(found["quantise 32 x 64", "eager both layouts"]["to_copy"]) == 3
    assert found["quantise 32 x 64", "compiled rowwise"]["error"] == "not compiled within 0 s"
    again = Given("cpu", frozenset((model, side, "") for (model, side), row in found.items() if "error" not in row))
    assert {row["model"] for row in products(again, [(32, 64, 16)], FEW, 0) if row.get("side") == COPY} == {
        "quantise 32 x 64"
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_operator_of_the_package_is_timed_from_its_parts_compiled_and_by_kernels(name: str) -> None:
    x = _random(48, 80)
    wanted = [made for layout in LAYOUTS[name] for made in quantize(x, layout, E4M3, True)]
    assert all(a.float().equal(b.float()) for a, b in zip(operator(LAYOUTS[name])(x), wanted, strict=True))
    options = {"rounds": FEW, "compiling": 0, "quantised": [(48, 80)]}
    model = f"quantize {name} 48 x 80"
    found = {row["side"]: row for row in products(Given("cpu"), [], **options) if row["model"] == model}
    assert found["parts"]["to_parts"] == [1, 1, 1]
    assert found["parts"]["gb_per_second"] > 0
    assert found["parts, compiled"]["error"] == "not compiled within 0 s"
    assert found["Triton"]["error"] == "Triton kernels run on CUDA, not on cpu"
    again = Given("cpu", frozenset((model, side, "") for side in found))
    assert model not in {row["model"] for row in products(again, [], **options)}


def test_where_triton_is_missing_a_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_products, "find_spec", lambda name: None)
    assert float8_products.kernels("both", "cuda") == "the package triton is not installed"
