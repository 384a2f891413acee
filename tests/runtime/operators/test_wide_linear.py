"""The operator wide_linear: torch's linear of 16-bit copies, whose weight and bias get float32 gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from autocastfx.runtime.operators.wide_linear import wide_linear
from tests.nearness import assert_near

LOWS = [torch.float16, torch.bfloat16]
ROWS = [256, 7]  # those that are added up in two stages, and in one


def _given(rows: int, low: torch.dtype, *, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return 16-bit rows in a batch of one, a float32 weight and a float32 bias, which all want gradients."""
    torch.manual_seed(0)
    shape = (16, 8) if transposed else (8, 16)
    x, weight, bias = torch.randn(1, rows, 16, dtype=low), torch.randn(shape), torch.randn(8)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def _ours(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    low_bias = None if bias is None else bias.to(x.dtype)
    return wide_linear(x, weight, weight.to(x.dtype), bias, low_bias, transposed)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    low = weight.to(x.dtype)
    return F.linear(x, low.mT if transposed else low, None if bias is None else bias.to(x.dtype))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("low", LOWS)
def test_is_linear_with_float32_gradients(low: torch.dtype, rows: int, transposed: bool) -> None:
    """Result and gradient of the input are linear's; gradients of weight and bias are as exact as float32's."""
    given = _given(rows, low, transposed=transposed)
    ours, plain = (function(*given, transposed=transposed) for function in (_ours, _plain))
    assert torch.equal(ours, plain)
    gradient = torch.randn(ours.shape).to(low)
    of_x, of_weight, of_bias = torch.autograd.grad(ours, given, gradient)
    torch.testing.assert_close(of_x, torch.autograd.grad(plain, given[0], gradient)[0])
    exact_x, exact = given[0].detach().double()[0], gradient.double()[0]
    exact_weight = exact_x.mT @ exact if transposed else exact.mT @ exact_x
    for one, other in ((of_weight, exact_weight), (of_bias, exact.sum(0))):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 256 * torch.finfo(torch.float32).eps * other.abs().max()


def test_is_nearer_to_float64_than_autocast() -> None:
    x, weight, bias = _given(256, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]

    def gradients(result: Tensor, *of: Tensor) -> dict[str, Tensor]:
        return dict(zip(("weight", "bias"), torch.autograd.grad(result.square().sum(), of), strict=True))

    with torch.autocast("cpu", torch.bfloat16):
        others = F.linear(x, weight, bias)
    ours, theirs = (gradients(made.float(), weight, bias) for made in (_ours(x, weight, bias), others))
    assert_near(ours, theirs, gradients(F.linear(*exact), *exact[1:]), times=1)


def test_a_gradient_beyond_float16_is_finite() -> None:
    x, weight, bias = _given(256, torch.float16)
    gradient = torch.full((1, 256, 8), 60_000.0, dtype=torch.float16)
    ours = torch.autograd.grad(_ours(x, weight, bias), (weight, bias), gradient)
    plain = torch.autograd.grad(_plain(x, weight, bias), (weight, bias), gradient)
    assert all(bool(one.isfinite().all()) for one in ours)
    assert not any(bool(one.isfinite().all()) for one in plain)


@pytest.mark.parametrize(
    "wants", [(True, False, True), (False, True, False), (True, True, False), (False, False, True)]
)
def test_only_what_learns_gets_a_gradient(wants: tuple[bool, bool, bool]) -> None:
    given = [t.detach().requires_grad_(want) for t, want in zip(_given(64, torch.bfloat16), wants, strict=True)]
    _ours(*given).float().sum().backward()
    assert tuple(t.grad is not None for t in given) == wants


def _second(function: Any, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    first = torch.autograd.grad(function(*given).float().square().sum(), given, create_graph=True)
    return list(torch.autograd.grad(sum(g.float().square().sum() for g in first), given))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of forward mode
def test_what_differentiates_otherwise_is_linear() -> None:
    """Second derivatives, transforms of torch.func, forward mode, a batch of gradients, and a compiler."""
    given = _given(7, torch.bfloat16)
    x, weight, bias = (t.detach() for t in given)

    def loss(function: Any) -> Any:
        return lambda w: function(x, w, bias).float().square().sum()

    for one, other in zip(_second(_ours, given), _second(_plain, given), strict=True):  # some of ours are not rounded
        assert (one - other).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * other.abs().max()
    assert torch.equal(torch.func.grad(loss(_ours))(weight), torch.func.grad(loss(_plain))(weight))
    batched = [torch.func.vmap(function, (0, None, None))(x, weight, bias) for function in (_ours, _plain)]
    assert torch.equal(*batched)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, torch.ones_like(weight))
        tangents = [forward_ad.unpack_dual(function(x, dual, bias)).tangent for function in (_ours, _plain)]
    assert tangents[0] is not None
    assert torch.equal(tangents[0], tangents[1])
    many = torch.randn(3, 1, 7, 8).bfloat16()
    for one, other in zip(
        *(torch.autograd.grad(f(*given), given, many, is_grads_batched=True) for f in (_ours, _plain)), strict=True
    ):
        assert torch.equal(one, other)
    compiled: Any = torch.compile(_ours, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight, bias), _plain(x, weight, bias))


def test_gradients_are_accumulated_and_hooked_as_others() -> None:
    x, weight, bias = _given(64, torch.bfloat16)
    seen: list[torch.dtype] = []
    weight.register_hook(lambda grad: seen.append(grad.dtype))
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.dtype))
    for _ in range(2):
        torch.utils.checkpoint.checkpoint(_ours, x, weight, bias, use_reentrant=False).float().sum().backward()
    assert seen == [torch.float32] * 4
    once = torch.autograd.grad(_ours(x, weight, bias).float().sum(), weight)[0]
    assert torch.equal(weight.grad, 2 * once)


@pytest.mark.parametrize("bias", [True, False])
def test_the_result_may_be_written_into(bias: bool) -> None:
    """As that of linear may; wav2vec 2.0 puts its mask's embedding there."""
    x, weight, added = _given(64, torch.bfloat16)
    results = []
    for function in (_ours, _plain):
        result = function(x, weight, added if bias else None)
        result[:, 3] = 0.0
        results += [result, torch.autograd.grad(result.float().square().sum(), x)[0]]
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])
