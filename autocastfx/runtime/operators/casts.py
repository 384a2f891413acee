"""Casts as operators: to 16 bits within a bound, and of a value whose dtype is known only when the graph runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# Tell eager tensors, whose sizes operators may inspect, from tensors that are compiled, exported or traced.


def is_concrete(tensor: Tensor) -> bool:
    """True for an eager tensor, whose sizes may be inspected; false while compiling, exporting or tracing."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and not torch.compiler.is_compiling() and get_proxy_mode() is None


# Leave a backward to autograd where it is differentiated again, or gets a batch of gradients.


def is_for_autograd(gradient: Tensor) -> bool:
    """True to differentiate again, and for a batch of gradients (vmap), which no kernel writes into a plain tensor."""
    return torch.is_grad_enabled() or is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient)


def by_autograd(
    compute: Callable[[], Tensor], given: Sequence[Tensor | None], wanted: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    """Return the ``wanted`` gradients of the tensors ``given``; differentiable again if gradients are enabled.

    ``compute`` computes with them, and ``gradient`` is that of its result. Gradients that are not wanted are None.
    """
    creates = torch.is_grad_enabled()
    with torch.enable_grad():
        result = compute()
    asked = [t for t, is_asked in zip(given, wanted, strict=True) if t is not None and is_asked]
    of_asked = iter(torch.autograd.grad(result, asked, gradient, create_graph=creates))
    return [next(of_asked) if is_asked else None for is_asked in wanted]


def writable(result: Tensor) -> Tensor:
    """Return what an autograd function may give: autograd lets nobody write into a view made inside of one."""
    return torch.ops.aten._unsafe_view.default(result, result.shape) if result._is_view() else result


# The operator ``autocastfx::saturating_cast``: a cast to 16 bits that limits finite values to a bound.
#
# It takes float32, and a bound of at least 8192 that the dtype can represent. Infinities and NaN are kept. Its
# derivative is a cast's, so that backward keeps nothing; under transforms of torch.func it is the derivative of
# ``clamp``, which is 0 beyond the bound. :mod:`autocastfx.runtime.operators.norms` says how these operators are
# made.

# A finite float32 value times this is below 4, which vanishes when added to a bound of 8192 or more and rounded to 16
# bits; an infinity stays infinite.
_TINY = 2.0**-126

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("saturating_cast(Tensor self, ScalarType dtype, float bound) -> Tensor")


class _SaturatingCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
        ctx.dtype, ctx.low = x.dtype, dtype
        return _without_autograd(x, dtype, bound)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return gradients[0].to(ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0].to(ctx.low)


def _with_autograd(x: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    if torch._C._are_functorch_transforms_active():  # which cannot take this autograd function
        return _without_autograd(x, dtype, bound)
    return _SaturatingCast.apply(x, dtype, bound)


def _without_autograd(x: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    clamped = x.clamp(-bound, bound)
    is_wrapped = torch._C._are_functorch_transforms_active()  # such a tensor, or a dual one, takes no out=
    if is_concrete(x) and not clamped.requires_grad and not is_wrapped:  # CUDA's kernel narrows what it writes
        return torch.add(clamped, x, alpha=_TINY, out=torch.empty_like(clamped, dtype=dtype))
    return clamped.add_(x.detach(), alpha=_TINY).to(dtype)  # choosing by isinf takes five times as long


_LIBRARY.impl("saturating_cast", _with_autograd, "Autograd")
_LIBRARY.impl("saturating_cast", _without_autograd, "CompositeExplicitAutograd")

saturating_cast = torch.ops.autocastfx.saturating_cast.default


# A 16-bit value that a graph returns in float32, and reads itself: gradients of what is computed with it go through
# what is returned, as without casts, so that a hook or ``retain_grad`` of the caller's sees them.


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor, low: Tensor) -> Tensor:
        ctx.dtype, ctx.low = wide.dtype, low.dtype
        return writable(low.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0].to(ctx.low)


def through(low: Tensor, wide: Tensor) -> Tensor:
    """Return ``low``, whose gradient goes to ``wide``, its cast; nothing is copied."""
    if not wide.requires_grad or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return low
    return _Through.apply(wide, low)
