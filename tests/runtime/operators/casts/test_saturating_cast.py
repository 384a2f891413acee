"""The operator saturating_cast: a cast that stops at a bound, and whose backward keeps nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import autocastfx
from autocastfx.graph.names import of_function
from autocastfx.runtime.operators.casts import saturating_cast
from tests.helpers import saved_bytes

LOW = [torch.float16, torch.bfloat16]


def written(x: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    return torch.where(x.isinf(), x, x.clamp(-bound, bound)).to(dtype)


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("dtype", LOW)
def test_it_is_a_clamp_and_a_cast_and_keeps_infinities_and_nan(dtype: torch.dtype, share: int) -> None:
    largest = torch.finfo(torch.float32).max
    bound = torch.finfo(dtype).max / share
    beyond = torch.tensor([bound, 0.0, 1e-30, 70000.0, largest, math.inf, math.nan])
    around = torch.linspace(0.9, 1.1, 1001) * min(bound, largest / 2)
    x = torch.cat([beyond, around])
    x = torch.cat([x, -x])
    torch.testing.assert_close(
        saturating_cast(x, dtype, bound), written(x, dtype, bound), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("dtype", LOW)
def test_no_number_of_float32_is_another_than_by_clamp_and_cast(dtype: torch.dtype, share: int) -> None:
    """Every 4099th one, and the sign of zero: the bits are compared."""
    bound = torch.finfo(dtype).max / share
    x = torch.arange(-(2**31), 2**31, 4099).to(torch.int32).view(torch.float32)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e-45, -1e-45])])
    found, expected = saturating_cast(x, dtype, bound), written(x, dtype, bound)
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.view(torch.int16)[~x.isnan()], expected.view(torch.int16)[~x.isnan()])


@pytest.mark.parametrize("dtype", LOW)
def test_its_gradient_is_that_of_a_cast(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1e30, -math.inf], requires_grad=True)
    given = torch.tensor([1.0, 3.0, 1 / 3], dtype=dtype)
    (found,) = torch.autograd.grad(saturating_cast(x, dtype, 2.0**14), x, given)
    assert found.dtype == torch.float32
    assert torch.equal(found, given.float())


def test_it_can_be_differentiated_twice_and_under_transforms() -> None:
    x = torch.randn(5, requires_grad=True)

    def squared(x: Tensor) -> Tensor:
        return saturating_cast(x, torch.bfloat16, 2.0**14).float().square().sum()

    (first,) = torch.autograd.grad(squared(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.full((5,), 2.0))
    assert torch.equal(torch.func.grad(squared)(x.detach()), first)
    beyond = torch.tensor([1e30, -math.inf])
    assert torch.equal(torch.func.grad(squared)(beyond), torch.zeros(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of its first use
def test_forward_mode_gives_the_same_derivative() -> None:
    x, tangent = torch.tensor([1.0, 1e30]), torch.tensor([3.0, 5.0])
    with forward_ad.dual_level():
        dual = saturating_cast(forward_ad.make_dual(x, tangent), torch.bfloat16, 2.0**14)
        found = forward_ad.unpack_dual(dual).tangent
    assert torch.equal(found, tangent.bfloat16())


def test_backward_keeps_nothing() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    assert saved_bytes(lambda: saturating_cast(x, torch.float16, 2.0**14)) == 0
    assert saved_bytes(lambda: written(x, torch.float16, 2.0**14)) >= x.nbytes


def test_a_compiler_sees_its_parts() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(lambda x: saturating_cast(x, torch.bfloat16, 2.0**14), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), saturating_cast(x, torch.bfloat16, 2.0**14))


def test_lists_call_it_by_its_own_name() -> None:
    assert of_function(saturating_cast) == "autocastfx::saturating_cast"


def test_a_converted_model_is_differentiated_in_forward_mode() -> None:
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32)),
        torch.randn(8, 32),
    )
    amp_model = autocastfx.convert(model, (x,), dtype=torch.float16)
    (_, found), (_, exact) = (torch.func.jvp(one, (x,), (torch.ones_like(x),)) for one in (amp_model, model))
    assert (found - exact).norm() / exact.norm() < 4 * torch.finfo(torch.float16).eps
