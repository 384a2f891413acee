"""The patterns that recomposing knows: formulas as models write them, and the operators that compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import fx

from autocastfx.graph.node import tensors
from autocastfx.passes.patterns.attention import NUMBERS, arguments, formulas
from autocastfx.passes.patterns.pattern import Arguments, Found, Pattern
from autocastfx.runtime.operators.norms import rms_norm
from autocastfx.runtime.operators.quick_gelu import SLOPE, quick_gelu

__all__ = ["LOSS_CAST", "MATH_ATTENTION", "PATTERNS", "REPEATED", "SHORT_ATTENTION", "chosen"]

_aten: Any = torch.ops.aten
One = Callable[[Any], Any]
Two = Callable[[Any, Any], Any]
Three = Callable[[Any, Any, Any], Any]
Four = Callable[[Any, Any, Any, Any], Any]
Five = Callable[[Any, Any, Any, Any, Any], Any]


# -- activations ------------------------------------------------------------------------------------------------------


def _tanh_gelu() -> Iterator[One]:
    scale, cube = math.sqrt(2 / math.pi), 0.044715
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * x**3)))
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * (x * x * x))))
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * x * x * x)))
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * (x * x) * x)))
    yield from _half_of(lambda x: torch.tanh(x * scale * (1 + cube * x * x)))
    yield from _half_of(lambda x: torch.tanh(x * scale * (1 + cube * (x * x))))
    yield from _half_of(lambda x: torch.tanh(x * scale * (1 + cube * x**2)))


def _erf_gelu() -> Iterator[One]:
    yield from _half_of(lambda x: torch.erf(x / math.sqrt(2)))
    yield from _half_of(lambda x: torch.erf(x * math.sqrt(0.5)))


def _half_of(part: One) -> Iterator[One]:
    """Half of x times one plus ``part``."""
    yield lambda x: 0.5 * x * (1 + part(x))
    yield lambda x: 0.5 * (x * (1 + part(x)))
    yield lambda x: x * (0.5 * (1 + part(x)))


def _of_x(**further: Any) -> Callable[[Found], Arguments]:
    return lambda found: ((found["x"],), further)


# -- norms ------------------------------------------------------------------------------------------------------------

_SQUARES: tuple[One, ...] = (lambda y: y**2, lambda y: y * y, torch.square)
_DIVIDED: tuple[Three, ...] = (  # by the root of a variance and epsilon
    lambda y, variance, eps: y * torch.rsqrt(variance + eps),
    lambda y, variance, eps: y / torch.sqrt(variance + eps),
    lambda y, variance, eps: y * (variance + eps) ** -0.5,
    lambda y, variance, eps: y / (variance + eps) ** 0.5,
)


def _rms_norms(square: One, divided: Three) -> Iterator[Three | Four]:
    def norm(x: Any, dims: Any, eps: Any) -> Any:
        return divided(x, square(x).mean(dims, True), eps)

    yield lambda x, dims, eps, weight: weight * norm(x, dims, eps)
    yield norm


def _layer_norms(variance: Two, divided: Three) -> Iterator[Three | Four | Five]:
    def norm(x: Any, dims: Any, eps: Any) -> Any:
        return divided(x - x.mean(dims, True), variance(x, dims), eps)

    yield lambda x, dims, eps, weight, bias: weight * norm(x, dims, eps) + bias
    yield lambda x, dims, eps, weight: weight * norm(x, dims, eps)
    yield norm


def _mean_of(square: One) -> Two:
    return lambda x, dims: square(x - x.mean(dims, True)).mean(dims, True)


_VARIANCES: tuple[Two, ...] = (
    *(_mean_of(square) for square in _SQUARES),
    lambda x, dims: _aten.var.dim(x, dims, False, True),
    lambda x, dims: _aten.var.correction(x, dims, correction=0, keepdim=True),
)


def _norm(count: int) -> Callable[[Found], Arguments | None]:
    """Arguments of a norm of ``count`` parameters, where it is over the last dimension and that has one size."""

    def arguments(found: Found) -> Arguments | None:
        x, eps, given = found["x"], found["eps"], [found[name] for name in ("weight", "bias") if name in found]
        size = tensors(x)[0].shape[-1] if tensors(x)[0].ndim else None
        is_one = type(size) is int and all(tuple(tensors(parameter)[0].shape) == (size,) for parameter in given)
        if not (is_one and _dimension(x, found["dims"]) == tensors(x)[0].ndim - 1 and isinstance(eps, (int, float))):
            return None
        return (x, [size], *given, *[None] * (count - len(given)), float(eps)), {}

    return arguments


def _dimension(x: fx.Node, dims: Any) -> int | None:
    """The only one of ``dims`` of ``x``, counted from the first."""
    one = dims[0] if isinstance(dims, (list, tuple)) and len(dims) == 1 else dims
    return one % max(tensors(x)[0].ndim, 1) if isinstance(one, int) else None


# -- softmax ----------------------------------------------------------------------------------------------------------


def _softmax() -> Iterator[Three]:
    yield _over_sum(lambda x, dims, dim: x - x.amax(dims, True))
    yield _over_sum(lambda x, dims, dim: x - x.max(dim, True)[0])
    yield _over_sum(lambda x, dims, dim: x - x.amax(dims, True).detach())
    yield _over_sum(lambda x, dims, dim: x - x.max(dim, True)[0].detach())


def _over_sum(shifted: Three) -> Three:
    def softmax(x: Any, dims: Any, dim: Any) -> Any:
        exponentials = torch.exp(shifted(x, dims, dim))
        return exponentials / exponentials.sum(dims, True)

    return softmax


def _along(found: Found) -> Arguments | None:
    dims = {_dimension(found["x"], found[name]) for name in ("dims", "dim") if name in found}
    return ((found["x"], dims.pop()), {}) if len(dims) == 1 and None not in dims else None


# ---------------------------------------------------------------------------------------------------------------------

_SIZES = frozenset(("dims", "dim", "eps"))


def _quick_gelu(x: Any) -> Any:
    return x * torch.sigmoid(SLOPE * x)


def _silu(x: Any) -> Any:
    return x * torch.sigmoid(x)


PATTERNS = (
    Pattern("tanh_gelu", tuple(_tanh_gelu()), _aten.gelu.default, _of_x(approximate="tanh")),
    Pattern("erf_gelu", tuple(_erf_gelu()), _aten.gelu.default, _of_x()),
    Pattern("quick_gelu", (_quick_gelu,), quick_gelu, _of_x()),
    Pattern("silu", (_silu,), _aten.silu.default, _of_x()),
    Pattern(
        "rms_norm",
        tuple(formula for pair in product(_SQUARES, _DIVIDED) for formula in _rms_norms(*pair)),
        rms_norm,
        _norm(1),
        _SIZES,
        owns_casts=True,
    ),
    Pattern(
        "layer_norm",
        tuple(formula for pair in product(_VARIANCES, _DIVIDED) for formula in _layer_norms(*pair)),
        _aten.layer_norm.default,
        _norm(2),
        _SIZES,
        owns_casts=True,
        own_layout=True,
    ),
    Pattern("softmax", tuple(_softmax()), _aten.softmax.int, _along, _SIZES, own_layout=True),
    *(
        Pattern(
            name,
            formulas(masked=masked),
            _aten.scaled_dot_product_attention.default,
            arguments,
            NUMBERS,
            own_layout=True,
            needs_range=masked,
            finite=frozenset(("mask",) if masked else ()),
            by_default=False,
        )
        for name, masked in (("attention", False), ("masked_attention", True))
    ),
)
LOSS_CAST = "loss_cast"  # no formula: the model's own cast to float32 before a cross entropy that is float32 anyway
REPEATED = "repeated"  # what is computed again from the same values
MATH_ATTENTION = "math_attention"  # the other way: attention with dropout on a CPU, which torch computes in float32
SHORT_ATTENTION = "short_attention"  # attention of few tokens on a CPU, of which backward computes the weights anew


def chosen(recompose: bool | Sequence[str]) -> tuple[str, ...]:
    """The names of the patterns that ``convert``'s argument asks for; ``True`` is all but those on demand.

    Raises:
        ValueError: there is no pattern of a name, or the argument is no such choice.
    """
    known = (*(pattern.name for pattern in PATTERNS), REPEATED, LOSS_CAST, MATH_ATTENTION, SHORT_ATTENTION)
    if isinstance(recompose, bool):
        on_demand = {pattern.name for pattern in PATTERNS if not pattern.by_default}
        return tuple(name for name in known if recompose and name not in on_demand)
    if isinstance(recompose, str):
        raise ValueError(f"recompose is True, False or a sequence of names: give ({recompose!r},), not {recompose!r}")
    if unknown := [name for name in recompose if name not in known]:
        raise ValueError(f"recompose: there is no pattern {unknown[0]!r}; the patterns are {', '.join(known)}")
    return tuple(name for name in known if name in recompose)
