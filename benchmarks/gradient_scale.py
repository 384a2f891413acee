"""How large a gradient is, for judging the error of each tensor by itself: also where the true gradient is zero."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

__all__ = ["gradient_distances", "gradient_scales"]


def gradient_scales(reference: Mapping[str, Tensor]) -> dict[str, float]:
    """What an error of each gradient is divided by: its norm, but at least that of a typical one of its module.

    The true gradient of some parameters is zero: of a bias before a batch norm, or of the keys' bias in attention.
    What is computed there is rounding noise. It comes from the same gradients of outputs as that of the weight beside
    it: an element of both is a sum over the same rows, and inputs are about 1. Where each term is off by an epsilon,
    so is each sum, of what an element of the module's gradients typically is. So the least scale of a tensor is the
    root mean square of its module's gradients times the root of its number of elements: noise is then about an
    epsilon, and a gradient of its own size is judged by that.

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
    """The error of each gradient of ``reference``, of the sizes of ``gradient_scales``; of zero gradients, as it is.

    Elements that hold the same infinity or both NaN do not count; other errors that are not finite are infinite.
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
