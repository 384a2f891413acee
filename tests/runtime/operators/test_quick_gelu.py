"""The operator quick_gelu: computed in float32, and backward keeps its input alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autocastfx.graph.names import of_function
from autocastfx.runtime.operators.quick_gelu import quick_gelu
from tests.helpers import saved_bytes

EPS = torch.finfo(torch.float32).eps


def written(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gradient(function: object, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    assert callable(function)
    return torch.autograd.grad(function(x).sum(), x)[0]


def test_float32_is_what_was_written_out() -> None:
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([0.0, 1e-30, 1e4, -1e4])])
    assert torch.equal(quick_gelu(x), written(x))
    exact = gradient(written, x.double())
    # Rounding the sigmoid, and one minus it, is off by an ulp of 1, times the slope of its argument.
    bound = 4 * EPS * (1 + 1.702 * x.abs())
    for function in (written, quick_gelu):
        assert ((gradient(function, x) - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_round_the_result_and_the_gradient_once(dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 501).to(dtype)
    assert torch.equal(quick_gelu(x), written(x.float()).to(dtype))
    found, exact, info = gradient(quick_gelu, x), gradient(written, x.double()), torch.finfo(dtype)
    assert found.dtype == dtype
    once = info.eps / 2 * exact.abs() + info.smallest_normal * info.eps
    assert ((found.double() - exact).abs() <= once + 4 * EPS * (1 + 1.702 * x.double().abs())).all()


def test_derivatives_are_exact_under_transforms_too() -> None:
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(quick_gelu, (x,))
    assert torch.autograd.gradgradcheck(quick_gelu, (x,))
    x = x.detach()
    torch.testing.assert_close(torch.func.grad(lambda x: quick_gelu(x).sum())(x), gradient(written, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_input_alone(dtype: torch.dtype) -> None:
    x = torch.randn(5, 8, dtype=dtype, requires_grad=True)
    assert saved_bytes(lambda: quick_gelu(x)) == x.nbytes < saved_bytes(lambda: written(x))


def test_lists_call_it_by_its_own_name() -> None:
    assert of_function(quick_gelu) == "autocastfx::quick_gelu"
