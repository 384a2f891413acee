"""The operator tf32_product: a float32 product that CUDA computes in TF32, in forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autocastfx.runtime.operators import tf32
from autocastfx.runtime.operators.tf32 import SWITCH, tf32_product

_C: Any = torch._C


def _state() -> tuple[str, bool]:
    return _C._get_fp32_precision_getter("cuda", "matmul"), _C._get_cublas_allow_tf32()


@pytest.fixture
def given() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    left, right, bias = torch.randn(2, 3, 8), torch.randn(8, 4), torch.randn(4)
    return left.requires_grad_(), right.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("function", [tf32_product, tf32._InTF32.apply])
def test_is_the_product(function: Callable[..., Any], given: tuple[Tensor, Tensor, Tensor]) -> None:
    """Off a GPU, the result and all gradients are those of a plain product."""
    left, right, bias = given
    plain = F.linear(left, right.mT, bias)
    ours = function(left, right, bias)
    assert torch.equal(ours, plain)
    grad = torch.randn(plain.shape)
    for one, other in zip(*(torch.autograd.grad(y, given, grad) for y in (ours, plain)), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(function(left, right, None), left @ right)


def test_the_result_may_be_written_into(given: tuple[Tensor, Tensor, Tensor]) -> None:
    result = tf32._InTF32.apply(*given)
    result[:, 1] = 0.0
    assert not torch.autograd.grad(result.sum(), given[0])[0][:, 1].any()


def test_gradients_of_gradients(given: tuple[Tensor, Tensor, Tensor]) -> None:
    double = [tensor.detach().double().requires_grad_() for tensor in given]
    assert torch.autograd.gradcheck(tf32._InTF32.apply, double)
    assert torch.autograd.gradgradcheck(tf32._InTF32.apply, double)
    batched = torch.func.vmap(tf32_product, (0, None, None))(*given)
    torch.testing.assert_close(batched, F.linear(given[0], given[1].mT, given[2]))


def test_products_run_under_the_switch(given: tuple[Tensor, Tensor, Tensor]) -> None:
    """It is on in forward and backward, and as before afterwards."""
    before, seen = _state(), list[bool]()
    plain = tf32._plain

    def watched(*args: Any) -> Tensor:
        seen.append(_C._get_cublas_allow_tf32())
        return plain(*args)

    with mock.patch.object(tf32, "_plain", watched):
        made = tf32._InTF32.apply(*given)
    assert seen == [True]
    assert _state() == before
    hooked: list[bool] = []
    with mock.patch.object(
        Tensor, "__matmul__", lambda a, b: hooked.append(_C._get_cublas_allow_tf32()) or a.matmul(b)
    ):
        made.sum().backward()
    assert hooked == [True, True]
    assert _state() == before


@pytest.mark.parametrize("allowed", [False, True])
def test_the_switch_is_as_before(allowed: bool) -> None:
    """Also where threads hold it on at a time, and where an error ends one."""
    first = _state()
    try:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        before, started, done = _state(), threading.Event(), threading.Event()

        def hold() -> None:
            with SWITCH.on():
                started.set()
                done.wait(5)

        other = threading.Thread(target=hold)
        other.start()
        started.wait(5)
        with pytest.raises(ZeroDivisionError), SWITCH.on():
            raise ZeroDivisionError
        assert _C._get_cublas_allow_tf32() is True  # the other thread's
        done.set()
        other.join()
        assert _state() == before
    finally:
        _C._set_cublas_allow_tf32(first[1])
        _C._set_fp32_precision_setter("cuda", "matmul", first[0])


def test_beside_torchs_newer_switch() -> None:
    first = _C._get_fp32_precision_getter("cuda", "matmul")
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # the older one raises now
        with SWITCH.on():
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        _C._set_fp32_precision_setter("cuda", "matmul", first)
