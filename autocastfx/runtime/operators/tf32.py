"""The operator ``autocastfx::tf32_product``: a float32 product whose factors CUDA's tensor cores round to TF32.

TF32 has float32's range and float16's 10 bits of mantissa; sums are float32. Forward and backward run so, whatever
torch's switch says, which is as before afterwards. It belongs to the process: other threads' float32 products may run
in TF32 meanwhile. On other devices, while compiling, under transforms of torch.func, and where backward is
differentiated again, it is a plain product.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autocastfx.runtime.operators.casts import by_autograd, is_concrete, is_for_autograd, writable

_C: Any = torch._C
_KEY = ("cuda", "matmul")
_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("tf32_product(Tensor left, Tensor right, Tensor? bias=None) -> Tensor")


class _Switch:
    """Torch's switch for TF32 in matrix products, which several threads may hold on at a time."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._before: tuple[bool | None, str] = None, "none"

    @property
    def is_on(self) -> bool:
        """True while a product of ours runs."""
        return self._count > 0

    @contextmanager
    def on(self) -> Generator[None]:
        """While open, products of float32 matrices run in TF32 on CUDA."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._switch_on()
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._switch_back()

    def _switch_on(self) -> None:
        precision: str = _C._get_fp32_precision_getter(*_KEY)
        try:
            self._before = _C._get_cublas_allow_tf32(), precision
            _C._set_cublas_allow_tf32(True)
        except RuntimeError:  # the program sets precision by torch's newer switch, beside which the older one raises
            self._before = None, precision
            _C._set_fp32_precision_setter(*_KEY, "tf32")

    def _switch_back(self) -> None:
        allowed, precision = self._before
        if allowed is not None:
            _C._set_cublas_allow_tf32(allowed)
        _C._set_fp32_precision_setter(*_KEY, precision)


SWITCH = _Switch()


class _InTF32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(left, right, bias)
        with SWITCH.on():
            return writable(_plain(left, right, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,), (left, right, bias), wanted = gradients, ctx.saved_tensors, ctx.needs_input_grad
        if gradient is None:
            return None, None, None
        if is_for_autograd(gradient):
            return tuple(by_autograd(partial(_plain, left, right, bias), (left, right, bias), wanted, gradient))
        rows = gradient.reshape(-1, gradient.shape[-1])
        with SWITCH.on():
            of_left = gradient @ right.mT if wanted[0] else None
            of_right = left.reshape(-1, left.shape[-1]).mT @ rows if wanted[1] else None
        return of_left, of_right, rows.sum(0) if wanted[2] else None


def _plain(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right + bias``: ``left`` has the shape (..., inner), ``right`` (inner, columns), ``bias`` (columns,)."""
    return torch.nn.functional.linear(left, right.mT, bias)


def _with_autograd(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch._C._are_functorch_transforms_active() or not is_concrete(left) or left.is_cpu:
        return _plain(left, right, bias)
    return _InTF32.apply(left, right, bias)


def _without_autograd(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if not is_concrete(left) or left.is_cpu:
        return _plain(left, right, bias)
    with SWITCH.on():
        return _plain(left, right, bias)


_LIBRARY.impl("tf32_product", _with_autograd, "Autograd")
_LIBRARY.impl("tf32_product", _without_autograd, "CompositeExplicitAutograd")

tf32_product = torch.ops.autocastfx.tf32_product.default
