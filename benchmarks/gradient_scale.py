"""Scale the errors of gradients, tensor by tensor, also for gradients that are truly zero."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def gradient_scales(reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the scale of each gradient's error: its norm, but at least that of a typical gradient of its module.

    Some parameters have a true gradient of zero: a bias before a batch norm, or the keys' bias in attention. Their
    computed gradient is rounding noise. It comes from the same output gradients as the gradient of the weight in the
    same module: elements of both are sums over the same rows, and inputs are about 1. If each term is off by an
    epsilon, so is each sum, relative to a typical element of the module's gradients. The smallest scale of a tensor is
    therefore the root mean square of its module's gradients times the square root of its number of elements. Noise
    then counts as about an epsilon, and larger gradients are judged by their own norm.

    Args:
        reference: float32 gradients by parameter name, those of a module under ``module.name``.
    """
    squares, counts = dict[str, float](), dict[str, int]()
    norms = {name: float(gradient.detach().double().norm()) for name, gradient in reference.items()}
    for name, gradient in reference.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + norms[name] ** 2
        counts[module] = counts.get(module, 0) + gradient.numel()
    typical = {module: math.sqrt(square / max(1, counts[module])) for module, square in squares.items()}
    floors = {name: typical[name.rpartition(".")[0]] * math.sqrt(g.numel()) for name, g in reference.items()}
    return {name: max(norm, floors[name]) for name, norm in norms.items()}


def gradient_distances(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of each gradient of ``reference``, divided by its scale if that is not zero.

    Elements with the same infinity, or NaN in both, do not count; other non-finite errors count as infinite.
    """
    scales, found = gradient_scales(_finite(reference)), dict[str, float]()
    for name, right in reference.items():
        a, b = ours[name].detach().double(), right.detach().double()
        error = float((a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).norm())
        relative = error / scales[name] if scales[name] > 0 else error
        found[name] = math.inf if math.isnan(relative) else relative
    return found


def _finite(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.detach().where(gradient.isfinite(), 0.0) for name, gradient in gradients.items()}
